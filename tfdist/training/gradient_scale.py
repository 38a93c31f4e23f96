"""The factors by which sums of gradients are multiplied before they are applied."""

from __future__ import annotations

import tensorflow as tf


def unscaling(weight: tf.Tensor, expected_weight: float, scale: tf.Tensor | float = 1.0) -> tf.Tensor:
    """float32 []: what makes the gradient of the mean loss of that of scale * sum_i w_i * loss_i / E.

    With `weight` = sum_i w_i and `expected_weight` = E it is E / W / scale; 0 where nothing counts.
    """
    return tf.where(weight > 0, expected_weight / tf.maximum(weight, 1e-30) / scale, 0.0)


def clipping(norm: tf.Tensor, limit: float) -> tf.Tensor:
    """float32 []: what makes a gradient of this norm one of at most `limit`."""
    return limit / tf.maximum(norm, limit)
