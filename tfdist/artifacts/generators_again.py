"""Puts Python's and NumPy's global generators where a resumed fit needs them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist.artifacts import state
from tfdist.compat.temporary_attributes import attribute_replaced


class GeneratorsAgain:
    """The states of the generators in a backup, until they are restored; None: there are none.

    Data that are read again may draw from a generator, which advances it as it did before: then it is left where it is,
    if data may have been read ahead.

    of_epoch: the states when the epoch in which the fit resumes began, if the data are read anew for each. By Python's,
    Keras draws the order of a PyDataset. Callbacks may have drawn in earlier epochs, which reading the data of these
    again does not.

    Attributes: shared, the generators by which the data have reordered themselves at the end of an earlier epoch, and
    from which something else has drawn: the data may now have another order.
    """

    def __init__(self, states: Mapping[str, Any] | None = None, of_epoch: Mapping[str, Any] | None = None):
        self._states, self._of_epoch = states or {}, of_epoch
        self._before: Mapping[str, Any] = {}
        self._moved: set[str] = set()
        self.shared: list[str] = []

    @contextlib.contextmanager
    def reading_earlier_epochs(self, adapter: Any) -> Iterator[None]:
        """Context manager in which the data of earlier epochs are read again. adapter: Keras' of the data."""
        of_keras, reordering = adapter.on_epoch_end, set[str]()

        def on_epoch_end() -> None:
            before = state.generator_states()
            of_keras()
            reordering.update(_changed(before))

        self._before = state.generator_states()
        with attribute_replaced(adapter, "on_epoch_end", on_epoch_end):
            yield
        self.after_reading()
        if self._of_epoch is not None:
            self.shared = sorted(reordering & _changed(self._of_epoch))
            self._moved.clear()

    def after_reading(self) -> None:
        self._moved |= _changed(self._before)

    def begin_epoch(self) -> None:
        """Call when the epoch in which a fit resumes begins, before it is read up to there."""
        if self._of_epoch is not None:
            state.restore_generator_states(self._of_epoch)
        self._before = state.generator_states()

    def restore(self) -> None:
        state.restore_generator_states({name: at for name, at in self._states.items() if name not in self._moved})


def _changed(before: Mapping[str, Any]) -> set[str]:
    """The generators that have another state now."""
    now = state.generator_states()
    return {name for name in now if json.dumps(now[name]) != json.dumps(before.get(name))}
