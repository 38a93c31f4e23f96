"""With which rows and weights a model is tried before and after its layers are cut.

With few rows and weights that are disturbed: behind an initial 0 nothing would be seen. A model that does not run so,
or gives no numbers, is disturbed less, then run with as many rows as it is trained with, in the end as it is.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.training.row_checks.trial_values import disturbed

_DISTURBED = 1.0  # by as much as the spread of each weight
_LESS = 0.2


class Attempt:
    """One way to try a model.

    rows: x of its samples. changes: id of a variable -> what is added to it, as long as the model is whole.
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
    """The attempts, in their order. few, many: x of few samples, and of a micro-batch."""
    ways = [(few, _DISTURBED), (few, _LESS), (many, _DISTURBED), (many, _LESS), (many, 0.0)]
    return [Attempt(model, rows, by) for rows, by in ways]


def _changes(model: keras.Model, by: float) -> dict[int, np.ndarray]:
    """What is added to the weights, as their constraints have it; to those that are not trained something above 0, as a
    variance must not become negative."""
    floating = [each for each in model.variables if tf.as_dtype(each.dtype).is_floating]
    values = [each.numpy() for each in floating]
    changes = {}
    for variable, value, other in zip(floating, values, disturbed(values, by), strict=True):
        if variable.trainable and by and variable.constraint is not None:
            other = keras.ops.convert_to_numpy(variable.constraint(tf.constant(other)))
        changes[id(variable)] = other - value if variable.trainable else abs(other - value)
    return changes
