"""Puts Python's and NumPy's global generators where a resumed fit needs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfdist.artifacts import state


class GeneratorsAgain:
    """The states of the generators in a backup, until they are restored; None: there are none.

    Data that are read again may draw from a generator, which advances it as it did before: then it is left where it is.

    of_epoch: the states when the epoch in which the fit resumes began, if the data are read anew for it. By Python's,
    Keras draws the order of a PyDataset. Callbacks may have drawn in earlier epochs, which reading the data of these
    again does not.
    """

    def __init__(self, states: Mapping[str, Any] | None = None, of_epoch: Mapping[str, Any] | None = None):
        self._states, self._of_epoch = states or {}, of_epoch
        self._before: Mapping[str, Any] = {}
        self._moved: set[str] = set()

    def before_reading(self) -> None:
        self._before = state.generator_states()

    def after_reading(self) -> None:
        now = state.generator_states()
        self._moved |= {name for name in now if now[name] != self._before[name]}

    def begin_epoch(self) -> None:
        """Call when the epoch in which a fit resumes begins, before it is read up to there."""
        if self._of_epoch is not None:
            state.restore_generator_states(self._of_epoch)
            self._moved.clear()
        self.before_reading()

    def restore(self) -> None:
        state.restore_generator_states({name: at for name, at in self._states.items() if name not in self._moved})
