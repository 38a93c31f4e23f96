"""Moments over the rows of all workers, for BatchNormalization(synchronized=True) on the sockets runtime.

Keras asks tf.distribute for its synchronised moments; where there is no tf.distribute strategy it would silently take
those of this worker's rows alone. Here the one function that asks is replaced (tests/parity covers it: a Keras that
renames it fails there, and at once with an AttributeError here).

Each worker contributes (count, mean, variance) of its rows; together (Chan, Golub and LeVeque 1979)
    mean = sum c_r m_r / C        variance = sum c_r (v_r + (m_r - mean)^2) / C
which does not lose digits as E[x^2] - E[x]^2 does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow as tf
from keras.src.backend.tensorflow import nn  # not public, and there is no public way

if TYPE_CHECKING:
    from tfdist.runtime.sockets import Sockets


def synchronize_with(runtime: Sockets) -> None:
    """From now on synchronised moments are over the workers of `runtime`."""
    if not hasattr(nn, "_compute_moments_sync"):
        raise AttributeError("keras.src.backend.tensorflow.nn has no _compute_moments_sync any more: runtime/batch_norm.py must be adapted to this Keras.")
    nn._compute_moments_sync = lambda x, axes, keepdims: moments(runtime, x, axes, keepdims)


def moments(runtime: Sockets, x: tf.Tensor, axes: Sequence[int], keepdims: bool = False, mask: tf.Tensor | None = None) -> tuple[tf.Tensor, tf.Tensor]:
    """(mean, variance) of x over `axes` and over all workers, with the gradient through all of them.

    mask: bool, x's shape without the last dim; only where it is true does x count.
    """
    if mask is None:
        mean, variance = tf.nn.moments(x, axes, keepdims=keepdims)
        count = tf.cast(tf.size(x), x.dtype) / tf.cast(tf.size(mean), x.dtype)
    else:
        weights = tf.broadcast_to(tf.cast(mask, x.dtype)[..., tf.newaxis], tf.shape(x))
        mean, variance = tf.nn.weighted_moments(x, axes, weights, keepdims=keepdims)
        count = tf.reduce_sum(weights) / tf.cast(tf.size(mean), x.dtype)
        mean, variance = (tf.where(count > 0, value, tf.zeros_like(value)) for value in (mean, variance))
    if runtime.rows_count is not None:
        count *= tf.cast(runtime.rows_count, x.dtype)
    rows = _gather(runtime, tf.concat([[count], tf.reshape(mean, [-1]), tf.reshape(variance, [-1])], 0)[tf.newaxis])
    share = tf.math.divide_no_nan(rows[:, :1], tf.reduce_sum(rows[:, :1]))
    means, variances = tf.split(rows[:, 1:], 2, axis=1)
    all_mean = tf.reduce_sum(share * means, 0)
    all_variance = tf.reduce_sum(share * (variances + tf.square(means - all_mean)), 0)
    return tf.reshape(all_mean, tf.shape(mean)), tf.reshape(all_variance, tf.shape(variance))


def _gather(runtime: Sockets, row: tf.Tensor) -> tf.Tensor:
    """[1, k] of each worker -> [workers, k]; its adjoint is the sum of the workers' upstream gradients, own row."""

    @tf.custom_gradient
    def gather(row):
        return runtime.gather([row])[0], lambda upstream: _own_sum(runtime, upstream)

    return gather(row)


def _own_sum(runtime: Sockets, rows: tf.Tensor) -> tf.Tensor:
    """[workers, k] of each worker -> [1, k], the sum over workers of this worker's row; its adjoint is `_gather`."""

    @tf.custom_gradient
    def own(rows):
        everyone = runtime.gather([rows[tf.newaxis]])[0]
        return tf.reduce_sum(everyone, 0)[runtime.rank:runtime.rank + 1], lambda upstream: _gather(runtime, upstream)

    return own(rows)
