"""Moments over the rows of all replicas, for BatchNormalization(synchronized=True) on every runtime.

Keras asks tf.distribute for its synchronized moments. Without a tf.distribute strategy it would silently use only this
worker's rows; with one it computes E[x^2] - E[x]^2, which loses all digits where the mean is large; and with a mask it
does not ask at all. So the function that Keras calls is replaced (the tests in tests/unit/runtime and tests/parity fail
if Keras renames it).

Each replica contributes (count, mean, variance) of its rows; combined (Chan, Golub and LeVeque 1979)
    mean = sum c_r m_r / C        variance = sum c_r (v_r + (m_r - mean)^2) / C
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from tfdist.compat import keras_batch_norm
from tfdist.runtime.base import Runtime

_apart = False
_weight: tf.Tensor | None = None  # weight of this worker's rows; None: 1


def synchronize_with(runtime: Runtime) -> None:
    """Makes synchronized moments cover the replicas of `runtime`, from now on.

    Raises UnsupportedError if this version of Keras is different.
    """

    def with_mask(of_keras: keras_batch_norm.Moments) -> keras_batch_norm.Moments:
        def of_layer(
            layer: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: tf.Tensor | None
        ) -> tuple[tf.Tensor, tf.Tensor]:
            if mask is None or not layer.synchronized:
                return of_keras(layer, inputs, mask)
            return moments(runtime, inputs, keras_batch_norm.reduction_axes(layer), mask=mask)

        return of_layer

    keras_batch_norm.replace_moments(
        with_mask, synchronized=lambda x, axes, keepdims: moments(runtime, x, axes, keepdims)
    )


@contextlib.contextmanager
def each_alone() -> Iterator[None]:
    """Context manager in which moments cover only this process's rows: for trial runs on one worker, without the other
    workers.
    """
    global _apart
    before, _apart = _apart, True
    try:
        yield
    finally:
        _apart = before


@contextlib.contextmanager
def weighted(weight: tf.Tensor) -> Iterator[None]:
    """Context manager for tracing a forward pass. weight: 0.0 if this worker has no rows of its own and computes on
    copies, else 1.0.
    """
    global _weight
    _weight = weight
    try:
        yield
    finally:
        _weight = None


def row_weight() -> tf.Tensor | None:
    """The `weight` of `weighted`; None outside of it."""
    return _weight


def moments(
    runtime: Runtime, x: tf.Tensor, axes: Sequence[int], keepdims: bool = False, mask: tf.Tensor | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """(mean, variance) of x over `axes` and over all replicas, with the gradient through all of them.

    mask: bool, x's shape without the last dim; x counts only where the mask is true.
    """
    if mask is None:
        mean, variance = tf.nn.moments(x, axes, keepdims=keepdims)
        count = tf.cast(tf.size(x), x.dtype) / tf.cast(tf.size(mean), x.dtype)[tf.newaxis]
    else:
        count, mean, variance = _masked(x, axes, keepdims, mask)
    if _apart:
        return mean, variance
    if _weight is not None:
        count *= tf.cast(_weight, x.dtype)
    rows = runtime.gather_row(tf.concat([count, tf.reshape(mean, [-1]), tf.reshape(variance, [-1])], 0))
    counts = rows[:, : count.shape[0]]
    share = tf.math.divide_no_nan(counts, tf.reduce_sum(counts, 0))
    means, variances = tf.split(rows[:, count.shape[0] :], 2, axis=1)
    all_mean = tf.reduce_sum(share * means, 0)
    apart = means - all_mean
    between = tf.square(apart) if mask is not None else _square_of_first_order(apart, means)
    all_variance = tf.reduce_sum(share * (variances + between), 0)
    return tf.reshape(all_mean, tf.shape(mean)), tf.reshape(all_variance, tf.shape(variance))


def _square_of_first_order(apart: tf.Tensor, means: tf.Tensor) -> tf.Tensor:
    """Returns apart^2, with its first derivative by the means, and no second derivative.

    `tf.nn.moments`, and so Keras without a mask, treats the mean in sum (x - mean)^2 as a constant: the first
    derivative is the same, the second is not. With the same treatment between workers, code that differentiates a
    gradient (a penalty on it, say) gets the result of one process.
    """
    fixed = tf.stop_gradient(apart)
    return tf.square(fixed) + 2.0 * fixed * (means - tf.stop_gradient(means))


def _masked(
    x: tf.Tensor, axes: Sequence[int], keepdims: bool, mask: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """(counts, mean, variance) over the places where the mask is true; zeros without a gradient if it is true nowhere.
    Values at other places may be NaN. Each channel has its own count, as the mask may run along the channels."""
    # Keras' own moments with a mask do not treat the mean as a constant.
    chosen = tf.broadcast_to(tf.expand_dims(tf.cast(mask, tf.bool), -1), tf.shape(x))
    x = tf.where(chosen, x, tf.zeros_like(x))
    count = tf.reduce_sum(tf.cast(chosen, x.dtype), axes, keepdims=True)
    divisor = tf.maximum(count, 1.0)
    mean = tf.reduce_sum(x, axes, keepdims=True) / divisor
    difference = tf.where(chosen, x - mean, tf.zeros_like(x))
    variance = tf.reduce_sum(tf.square(difference), axes, keepdims=True) / divisor
    counts = tf.reshape(count, [-1])
    if not keepdims:
        mean, variance = (tf.squeeze(each, list(axes)) for each in (mean, variance))
    return counts, mean, variance
