"""The results of a model for a few rows, and their comparison up to rounding.

What rounding may do is estimated by moving the weights by a millionth: another order of summation does less. So a small
difference of large numbers may deviate by more than another number, and a gradient may be 0 up to rounding. Each
channel of an output is compared relative to its own largest number: one channel may be the price of a house, in
dollars, and the next its number of rooms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.training.parallel.tensor import VariablePart

NEARBY = 1e-6  # by how much each weight is moved, relative to itself, to see what rounding may do
_MOVES = 30.0  # the tolerated difference, as a multiple of what that changes
# Relative to the largest number; where a user's own layer casts to half precision, a value may round to its neighbor.
_TOLERANCE, _TOLERANCE_HALF = 1e-5, 2e-2
RANDOM = 1e-3  # a model that differs from itself by more than this is random
_NOISE, _NOISE_HALF = 1e-7, 1e-3  # times the largest number of all gradients, for where moving weights shows nothing
HALF = (tf.float16, tf.bfloat16)


class Results(NamedTuple):
    """The results of a model for a few rows.

    added: the losses that layers add, each []. gradients: of a sum of the outputs with random weights, each channel
    divided by its largest number; gradients_of_added: of the sum of those losses, each divided by its own size (empty
    without losses); both by the trainable variables. half: whether anything was computed in half precision.
    """

    outputs: Sequence[np.ndarray]
    added: Sequence[np.ndarray]
    gradients: Sequence[np.ndarray]
    gradients_of_added: Sequence[np.ndarray]
    half: bool

    def is_usable(self, all_finite: bool) -> bool:
        """Whether all numbers are finite, or, if not `all_finite`, at least some of each output."""
        if all_finite:
            return all(np.isfinite(each).all() for each in (*self.outputs, *self.gradients, *self.gradients_of_added))
        return all(np.isfinite(each).any() for each in self.outputs)


def inverse_of_largest(values: tf.Tensor) -> tf.Tensor:
    """1 / the largest magnitude in each channel (the last dim) of a tensor, float32; 1 where it is 0 or not finite."""
    sizes = tf.abs(tf.cast(tf.stop_gradient(values), tf.float32))
    largest = tf.reduce_max(sizes, list(range(max((values.shape.rank or 0) - 1, 0))))
    usable = tf.math.is_finite(largest) & (largest > 0)
    return tf.where(usable, 1 / tf.where(usable, largest, 1.0), 1.0)


class Comparison:
    """Compares results of the whole model with other results. own: (whole array, shape) -> the part of this shape that
    is here.
    """

    def __init__(
        self,
        whole: Results,
        variables: Sequence[keras.Variable],
        own: Callable[[np.ndarray, Sequence[int]], np.ndarray],
    ):
        self.whole, self._variables, self._own = whole, variables, own
        self._moved = {name: [np.zeros(1)] * len(getattr(whole, name)) for name in Results._fields if name != "half"}

    def allow(self, other: Results) -> None:
        """Counts the differences between `other` and the whole model's results as rounding. `other` is also of the
        whole model: with slightly different weights, or run again, as GPUs add up in any order. Only the largest
        differences are kept, as gradients are as large as the model.
        """
        for name, before in self._moved.items():
            for place, (one, another) in enumerate(zip(getattr(self.whole, name), getattr(other, name), strict=True)):
                axis = _without_channels(one) if name == "outputs" else None
                with np.errstate(invalid="ignore"):
                    before[place] = np.maximum(before[place], _largest(one - another, axis))

    def difference(self, found: Results, parts: Mapping[int, VariablePart], tolerance: float = _TOLERANCE) -> str:
        """Returns what differs, as a phrase; "" if nothing does. parts: id of a variable -> its part that is here."""
        noise = _NOISE
        if self.whole.half or found.half:
            tolerance, noise = max(tolerance, _TOLERANCE_HALF), _NOISE_HALF
        return (
            self._of_outputs(found, tolerance)
            or self._of_added(found, tolerance)
            or self._of_gradients("gradients", "", found, parts, tolerance, noise)
            or self._of_gradients(
                "gradients_of_added", " of the losses that layers add", found, parts, tolerance, noise
            )
        )

    def _of_outputs(self, found: Results, tolerance: float) -> str:
        cut = [a.shape != b.shape for a, b in zip(self.whole.outputs, found.outputs, strict=True)]
        if any(cut) and len(cut) > 1:
            return "one of its several outputs comes in parts"
        for whole, moved, b in zip(self.whole.outputs, self._moved["outputs"], found.outputs, strict=True):
            expected = self._own(whole, b.shape)
            if expected.shape != b.shape:
                return f"its outputs have another shape, {b.shape} instead of {whole.shape}"
            moved = moved if whole.shape == b.shape else self._own(moved, b.shape)  # per channel
            if _differ(expected, b, tolerance, _MOVES * moved, _without_channels(whole)):
                return "its outputs differ"
        return ""

    def _of_added(self, found: Results, tolerance: float) -> str:
        if len(self.whole.added) != len(found.added) or any(
            _differ(whole, b, tolerance, _MOVES * moved)
            for whole, moved, b in zip(self.whole.added, self._moved["added"], found.added, strict=True)
        ):
            return "the losses that its layers add differ"
        return ""

    def _of_gradients(
        self,
        name: str,
        words: str,
        found: Results,
        parts: Mapping[int, VariablePart],
        tolerance: float,
        relative_noise: float,
    ) -> str:
        before, after = getattr(self.whole, name), getattr(found, name)
        noise = relative_noise * max((np.max(np.abs(each), initial=0.0) for each in before), default=0.0)
        for variable, whole, moved, b in zip(self._variables, before, self._moved[name], after, strict=False):
            part = parts.get(id(variable))
            if part is not None and part.axis != "model":
                continue  # its gradient is a sum over the samples of all members
            expected = part.cut(whole) if part else whole
            if _differ(expected, b, tolerance, _MOVES * moved.max() + noise):
                return f"the gradient{words} of {variable.path} differs"
        return ""


def _without_channels(values: np.ndarray) -> tuple[int, ...]:
    """All axes but the last."""
    return tuple(range(max(values.ndim - 1, 0)))


def _differ(one: np.ndarray, other: np.ndarray, tolerance: float, noise: Any, axis: Any = None) -> bool:
    """Whether numbers differ by more than `tolerance` times the largest of `one` over `axis`, plus `noise`. A number
    that is finite in only one of the two differs; numbers that are finite in neither are ignored."""
    if one.shape != other.shape or (np.isfinite(one) != np.isfinite(other)).any():
        return True
    with np.errstate(invalid="ignore"):
        return bool(np.any(np.abs(one - other) > tolerance * _largest(one, axis) + noise))


def _largest(values: np.ndarray, axis: Any) -> np.ndarray:
    """The largest finite magnitude over `axis`; over all dims if `axis` is None."""
    return np.max(np.abs(values), axis, initial=0.0, where=np.isfinite(values), keepdims=True)
