"""Puts Python's and NumPy's global generators where a resumed fit needs them."""

from __future__ import annotations

import contextlib
import functools
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tfdist.artifacts import state

_OF_DATA = "tfdist_data_calls"  # the attribute of an adapter
_NAMES = {"numpy": "NumPy's", "python": "Python's"}


class DataCalls:
    """The calls of on_epoch_begin and on_epoch_end of a fit's data, in which a PyDataset may reorder itself.

    For each call it keeps the states, before it, of the generators that the call has moved. A resumed fit begins these
    calls with the same states, so the rows get the same order, whatever else draws from the generators (callbacks are
    not called for epochs that are read again). Keras makes a first call of on_epoch_end before any callback is called:
    only the state after it is known.
    """

    def __init__(self) -> None:
        self._kept: list[Mapping[str, Any]] = []
        self._done = 0
        self._since = state.generator_states()
        self._first = {name: zlib.crc32(json.dumps(at).encode()) for name, at in self._since.items()}
        self._between: set[str] = set()
        self._moved_at_ends: set[str] = set()

    @classmethod
    def of(cls, adapter: Any) -> DataCalls:
        """Those of Keras' adapter of the data; call when training begins. All backups of a fit share them."""
        found = vars(adapter).get(_OF_DATA)
        if found is None:
            found = cls()
            setattr(adapter, _OF_DATA, found)
            for name in ("on_epoch_begin", "on_epoch_end"):
                call = functools.partial(found._call, getattr(adapter, name), name == "on_epoch_end")
                setattr(adapter, name, call)  # each fit makes an adapter
        return found

    def _call(self, of_keras: Callable[[], None], is_end: bool) -> None:
        self._between |= _changed(self._since)
        is_repeated = self._done < len(self._kept)
        if is_repeated:
            state.restore_generator_states(self._kept[self._done])
        before = state.generator_states()
        of_keras()
        self._since, moved = state.generator_states(), _changed(before)
        if not is_repeated:
            self._kept.append({name: _compact(before[name]) for name in moved})
        self._done += 1
        if is_end:
            self._moved_at_ends |= moved

    def fields(self) -> dict[str, Any]:
        """What a backup holds; nothing if the data do not draw in these calls."""
        if not any(self._kept):
            return {}
        return {"before": list(self._kept), "first": {name: self._first[name] for name in self._moved_at_ends}}

    def repeat(self, fields: Mapping[str, Any]) -> list[str]:
        """Lets the next calls begin as those in a backup. fields: of the backup. Returns whose generators Keras' first
        call has left in another state than then: the data may have begun in another order."""
        self._kept = list(fields.get("before", ()))
        return [_NAMES[name] for name, first in sorted(fields.get("first", {}).items()) if first != self._first[name]]

    def repeat_no_more(self) -> None:
        """Call when the resumed fit is where the backup was saved: all later calls are new ones."""
        del self._kept[self._done :]

    def watch(self) -> None:
        self._since, self._between = state.generator_states(), set()

    def drawn_between(self) -> set[str]:
        """The generators that have moved since `watch`, but not in these calls."""
        return self._between | _changed(self._since)


class GeneratorsAgain:
    """The states of the generators in a backup, until they are restored; None: there are none.

    Data that are read again may draw from a generator, which advances it as it did before: then it is left where it is,
    if data may have been read ahead.

    of_epoch: the states when the epoch in which the fit resumes began, if the data are read anew for each. By Python's,
    Keras draws the order of a PyDataset. Callbacks may have drawn in earlier epochs, which reading the data of these
    again does not. calls: those of the data.
    """

    def __init__(
        self,
        states: Mapping[str, Any] | None = None,
        of_epoch: Mapping[str, Any] | None = None,
        calls: DataCalls | None = None,
    ):
        self._states, self._of_epoch, self._calls = states or {}, of_epoch, calls or DataCalls()
        self._moved: set[str] = set()

    @contextlib.contextmanager
    def reading_earlier_epochs(self) -> Iterator[None]:
        """Context manager in which the data of earlier epochs are read again."""
        self._calls.watch()
        yield
        self.after_reading()
        if self._of_epoch is not None:
            self._moved.clear()

    def after_reading(self) -> None:
        self._moved |= self._calls.drawn_between()

    def begin_epoch(self) -> None:
        """Call when the epoch in which a fit resumes begins, before it is read up to there."""
        if self._of_epoch is not None:
            state.restore_generator_states(self._of_epoch)
        self._calls.watch()

    def restore(self) -> None:
        self._calls.repeat_no_more()
        state.restore_generator_states({name: at for name, at in self._states.items() if name not in self._moved})


def _compact(at: Any) -> list:
    """The state of a generator with its numbers as an array: 2.5 kB."""
    return [np.asarray(part, np.uint32) if isinstance(part, (list, tuple)) else part for part in at]


def _changed(before: Mapping[str, Any]) -> set[str]:
    """The generators that have another state now."""
    now = state.generator_states()
    return {name for name in now if json.dumps(now[name]) != json.dumps(before.get(name))}
