"""Changed weights and rows for trials of a model: an initial 0, or rows that look alike, can hide a lot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

TOLERANCE = 1e-5  # relative to the largest value, if the same rows are computed twice
ROUNDED = 1e-3  # the same, if other shapes may run other kernels; for half precision the probe has its own tolerance
APART = (0.2, 5.0)  # the smallest and the largest scale of rows, in batches and in tables
_NOISE = 100_003  # most numbers drawn for a weight; then they repeat. Prime, so that neighboring rows differ


def disturbed(weights: Sequence[np.ndarray], by: float) -> Sequence[np.ndarray]:
    """Returns perturbed weights: an initial 0 can hide a dependence of a loss. Returns them unchanged if `by` is 0."""
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
    """Returns the weight with a relative perturbation of about `moved` in each of its numbers; unchanged if that is
    0."""
    if not moved:
        return weight
    noise = np.float32(moved) * np.random.default_rng(5).standard_normal(min(weight.size, _NOISE), np.float32)
    return (weight * (1 + np.resize(noise, weight.shape))).astype(weight.dtype)


def _some_of(weight: np.ndarray) -> np.ndarray:
    """Returns a sample of a weight's numbers, enough to estimate their spread."""
    return weight.reshape(-1)[:: weight.size // _NOISE | 1]  # odd, so as not to stay in one column


def with_rows_apart(weight: np.ndarray, size: float) -> np.ndarray:
    """Returns the weight times `size`. The rows of a table get different sizes, as this is the only way to give integer
    inputs rows of different sizes."""
    if weight.ndim < 2:
        return np.asarray(size * weight, weight.dtype)
    rows = np.random.default_rng(4).permutation(np.geomspace(*APART, len(weight)))
    return np.asarray(size * weight * rows.reshape(-1, *[1] * (weight.ndim - 1)), weight.dtype)


def spread(leaf: tf.Tensor, scales: Sequence[float] | np.ndarray) -> tf.Tensor:
    """Returns floating rows, each multiplied by a scale: limits at which a layer changes its behavior lie between the
    smallest and the largest. A tensor with another number of rows does not belong to the batch and stays unchanged.
    """
    if not leaf.dtype.is_floating or leaf.shape.rank == 0 or leaf.shape[0] != len(scales):
        return leaf
    return leaf * tf.cast(tf.reshape(tf.constant(scales), [-1, *[1] * (leaf.shape.rank - 1)]), leaf.dtype)


def shortened(leaf: tf.Tensor, number: int) -> tf.Tensor:
    """Returns integer rows that end earlier and earlier, like sentences padded with 0; others are unchanged."""
    if leaf.dtype.is_floating or not leaf.dtype.is_integer or leaf.shape.rank != 2 or leaf.shape[0] != number:
        return leaf
    length = leaf.shape[1] or 0
    kept = np.ceil(length * (1 - np.arange(number) / number))  # the first row stays whole, and none is empty
    return leaf * tf.cast(np.arange(length) < kept[:, None], leaf.dtype)


def sound(leaf: Any, kept: float, noise: float, draw: int | None = None) -> tf.Tensor:
    """Returns a tensor without NaN or infinity, times `kept`, and, with `noise`, with other values in each row.
    Integers, which may be places in a table, are not scaled: with `noise`, each row gets one of its own values in all
    of its places, or, with a `draw`, in each place a random value within the range of all rows.
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
    """Returns whether two results differ by more than `tolerance`, relative to the largest of `sizes` (`one` if not
    given). Values that are not finite are ignored.
    """
    finite = np.isfinite(one) & np.isfinite(other)
    sizes = np.abs(one if sizes is None else sizes)
    largest = np.max(sizes, where=np.isfinite(sizes), initial=0.0)
    apart = np.subtract(one, other, out=np.zeros(np.shape(one)), where=finite)
    return bool(np.any(np.abs(apart) > tolerance * largest))


def any_differ(some: Sequence[np.ndarray], others: Sequence[np.ndarray], tolerance: float) -> bool:
    """Returns whether two results at the same place of both sequences differ."""
    return any(differ(one, other, tolerance) for one, other in zip(some, others, strict=True))


def differ_beyond_noise(one: np.ndarray, other: np.ndarray, tolerance: float, noise: float) -> bool:
    """Returns whether two results differ by more than `noise` plus `tolerance` times the largest finite number of
    `one`. NaN is ignored.
    """
    largest = np.max(np.abs(one), initial=0.0, where=np.isfinite(one))
    with np.errstate(invalid="ignore"):
        return bool(np.any(np.abs(one - other) > tolerance * largest + noise))
