"""Keras' three loops over data, and the names of the functions and methods of a model that each calls."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import keras


class Loop(enum.Enum):
    """Keras' loops; their functions are named after the value."""

    TRAIN = "train"
    TEST = "test"
    PREDICT = "predict"

    @property
    def function_name(self) -> str:
        """The attribute of keras.Model that a loop calls."""
        return f"{self.value}_function"

    @property
    def call_name(self) -> str:
        """The name of tfdist's function that runs the loop."""
        return {"train": "fit", "test": "evaluate"}.get(self.value, self.value)

    @property
    def maker_name(self) -> str:
        """The method of keras.Model that a loop calls before the function, each time the loop runs."""
        return f"make_{self.function_name}"

    @property
    def step_name(self) -> str:
        """The method of keras.Model that computes one step of a loop."""
        return f"{self.value}_step"

    def step_of(self, model: keras.Model) -> Callable[[Any], Any]:
        """Keras' own train_step, test_step or predict_step, overridden or not."""
        return getattr(model, self.step_name)
