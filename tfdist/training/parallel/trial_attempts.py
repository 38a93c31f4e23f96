"""The rows and weights with which a model is tried before and after its layers are cut.

The first attempts use few rows and perturbed weights: behind weights that are initially 0, no difference would be seen.
A model that does not run like this, or gives no finite numbers, is perturbed less, then run with as many rows as it is
trained with, and finally with its own weights.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.training.row_checks.trial_values import disturbed

_DISTURBED = 1.0  # in units of the spread of each weight
_LESS = 0.2


class Attempt:
    """One way to try a model.

    rows: x of its samples. changes: id of a variable -> the amount added to it, for the whole variable.
    """

    def __init__(self, model: keras.Model, rows: Any, disturbed_by: float):
        self.rows, self._model, self._by = rows, model, disturbed_by

    @functools.cached_property
    def changes(self) -> dict[int, np.ndarray]:
        return _changes(self._model, self._by)

    def give_up(self) -> None:
        """Frees the changes, which are as large as the model."""
        vars(self).pop("changes", None)


def attempts(model: keras.Model, few: Any, many: Any) -> list[Attempt]:
    """Returns the attempts in order. few, many: x of few samples, and of a micro-batch."""
    ways = [(few, _DISTURBED), (few, _LESS), (many, _DISTURBED), (many, _LESS), (many, 0.0)]
    return [Attempt(model, rows, by) for rows, by in ways]


def _changes(model: keras.Model, by: float) -> dict[int, np.ndarray]:
    """Returns the amounts added to the weights, as their constraints allow; for weights that are not trained they are
    positive, as a variance must not become negative."""
    floating = [each for each in model.variables if tf.as_dtype(each.dtype).is_floating]
    values = [each.numpy() for each in floating]
    changes = {}
    for variable, value, other in zip(floating, values, disturbed(values, by), strict=True):
        if variable.trainable and by and variable.constraint is not None:
            other = keras.ops.convert_to_numpy(variable.constraint(tf.constant(other)))
        changes[id(variable)] = other - value if variable.trainable else abs(other - value)
    return changes
