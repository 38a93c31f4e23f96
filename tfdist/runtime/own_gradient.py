"""Functions whose gradient is not the gradient of their operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf


def with_gradient(
    forward: Callable[[tf.Tensor], tf.Tensor], backward: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor
) -> tf.Tensor:
    """forward(x); `backward` turns the gradient with respect to the result into that with respect to x."""

    @tf.custom_gradient
    def function(t: tf.Tensor):
        return forward(t), lambda upstream: backward(tf.convert_to_tensor(upstream))

    return function(x)  # pyright: ignore[reportReturnType] - by TensorFlow's types it would return the pair


def dense(upstream: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor]:
    """Converts the gradients given to a tf.custom_gradient to tensors: for row look-ups they are tf.IndexedSlices."""
    return [tf.convert_to_tensor(gradient) for gradient in upstream]
