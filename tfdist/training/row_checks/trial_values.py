"""Other weights and rows than a run has, to try a model with: an initial 0 or rows that look alike can hide much."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

TOLERANCE = 1e-5  # of the largest value, where the same rows are computed twice
ROUNDED = 1e-3  # the same, where other shapes may run other kernels; of half precision the tolerance of the probe
APART = (0.2, 5.0)  # the smallest and the largest of rows, of batches and of tables
_NOISE = 100_003  # numbers drawn at most for a weight, then again from the first; prime: rows next to each other differ


def disturbed(weights: Sequence[np.ndarray], by: float) -> Sequence[np.ndarray]:
    """The weights, disturbed: an initial 0 can hide what a loss depends on. The same if `by` is 0."""
    if not by:
        return weights
    random = np.random.default_rng(0)
    result = []
    for weight in weights:
        scale = by * (float(np.std(_some_of(weight), dtype=np.float64)) or 0.1)
        noise = np.float32(scale) * random.standard_normal(min(weight.size, _NOISE), np.float32)
        result.append((weight + np.resize(noise, weight.shape)).astype(weight.dtype))
    return result


def nearly(weight: np.ndarray, moved: float) -> np.ndarray:
    """The weight, each of its numbers larger or smaller by some `moved` of itself. The same if that is 0."""
    if not moved:
        return weight
    noise = np.float32(moved) * np.random.default_rng(5).standard_normal(min(weight.size, _NOISE), np.float32)
    return (weight * (1 + np.resize(noise, weight.shape))).astype(weight.dtype)


def _some_of(weight: np.ndarray) -> np.ndarray:
    """A sample of a weight's numbers, enough to know their spread."""
    return weight.reshape(-1)[:: weight.size // _NOISE | 1]  # odd, so as not to stay in one column


def with_rows_apart(weight: np.ndarray, size: float) -> np.ndarray:
    """The weight times `size`; a table's rows get different sizes, as only that sets apart the rows of
    whole-number inputs."""
    if weight.ndim < 2:
        return np.asarray(size * weight, weight.dtype)
    rows = np.random.default_rng(4).permutation(np.geomspace(*APART, len(weight)))
    return np.asarray(size * weight * rows.reshape(-1, *[1] * (weight.ndim - 1)), weight.dtype)


def spread(leaf: tf.Tensor, scales: Sequence[float] | np.ndarray) -> tf.Tensor:
    """Rows of numbers times a scale each: between the smallest and the largest lie the limits at which a layer turns to
    something else. What has another number of rows stands beside a batch, and stays as it is.
    """
    if not leaf.dtype.is_floating or leaf.shape.rank == 0 or leaf.shape[0] != len(scales):
        return leaf
    return leaf * tf.cast(tf.reshape(tf.constant(scales), [-1, *[1] * (leaf.shape.rank - 1)]), leaf.dtype)


def shortened(leaf: tf.Tensor, number: int) -> tf.Tensor:
    """Rows of whole numbers that end earlier and earlier, as sentences filled up with 0; others as they are."""
    if leaf.dtype.is_floating or not leaf.dtype.is_integer or leaf.shape.rank != 2 or leaf.shape[0] != number:
        return leaf
    length = leaf.shape[1] or 0
    kept = np.ceil(length * (1 - np.arange(number) / number))  # the first row whole, and none empty
    return leaf * tf.cast(np.arange(length) < kept[:, None], leaf.dtype)


def sound(leaf: Any, kept: float, noise: float, draw: int | None = None) -> tf.Tensor:
    """`kept` of a tensor without its NaN, and, with `noise`, other values in each row: of whole numbers, which may be
    places in a table, one of each row in all of its places, or, by a `draw`, some between those of all rows in a place.
    """
    leaf = tf.convert_to_tensor(leaf)
    if leaf.dtype.is_floating:
        values = kept * tf.where(tf.math.is_finite(leaf), leaf, tf.zeros_like(leaf))
        drawn = tf.constant(np.random.default_rng(1).normal(size=leaf.shape), leaf.dtype)
        return values + noise * drawn * (tf.math.reduce_std(values) + tf.ones([], leaf.dtype))
    numbers = leaf.numpy()
    if leaf.dtype.is_integer and noise and numbers.ndim > 1 and numbers.size:
        rows, places = numbers.reshape(len(numbers), -1), np.arange(len(numbers))
        if draw is not None:
            between = np.random.default_rng(draw).integers(rows.min(0), rows.max(0), rows.shape, endpoint=True)
            return tf.constant(between.reshape(numbers.shape), leaf.dtype)
        one_each = rows[places, places % rows.shape[1]]
        return tf.constant(np.broadcast_to(one_each.reshape(-1, *[1] * (numbers.ndim - 1)), numbers.shape))
    return leaf


def differ(one: np.ndarray, other: np.ndarray, tolerance: float, sizes: np.ndarray | None = None) -> bool:
    """Whether numbers of what was tried twice are more than `tolerance` apart, in parts of the largest of `sizes`
    (`one` if not given). What is not finite tells nothing.
    """
    finite = np.isfinite(one) & np.isfinite(other)
    sizes = np.abs(one if sizes is None else sizes)
    largest = np.max(sizes, where=np.isfinite(sizes), initial=0.0)
    apart = np.subtract(one, other, out=np.zeros(np.shape(one)), where=finite)
    return bool(np.any(np.abs(apart) > tolerance * largest))


def any_differ(some: Sequence[np.ndarray], others: Sequence[np.ndarray], tolerance: float) -> bool:
    """Whether two of them, in order, are apart."""
    return any(differ(one, other, tolerance) for one, other in zip(some, others, strict=True))


def differ_beyond_noise(one: np.ndarray, other: np.ndarray, tolerance: float, noise: float) -> bool:
    """Whether numbers are further apart than `tolerance`, in parts of the largest finite one of `one`, and `noise`. NaN
    tells nothing.
    """
    largest = np.max(np.abs(one), initial=0.0, where=np.isfinite(one))
    with np.errstate(invalid="ignore"):
        return bool(np.any(np.abs(one - other) > tolerance * largest + noise))
