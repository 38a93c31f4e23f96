"""Puts Python's and NumPy's global generators where a resumed fit needs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfdist.artifacts import state


class GeneratorsAgain:
    """The states of the generators in a backup, until they are restored; None: there are none.

    Data that are read again may draw from the generators, which advances them as it did before: then they are left
    where they are.
    """

    def __init__(self, states: Mapping[str, Any] | None = None):
        self._states = states
        self._before: Mapping[str, Any] = {}

    def before_reading(self) -> None:
        self._before = state.generator_states()

    def after_reading(self) -> None:
        if state.generator_states() != self._before:
            self._states = None

    def restore(self) -> None:
        if self._states is not None:
            state.restore_generator_states(self._states)
