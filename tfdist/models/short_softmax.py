"""Softmax in float32 of which only a half-precision copy is used: the gradient keeps that copy.

So attention does it (blocks.py): scores in float32, softmax, weights in bfloat16 or float16 for the product with the
values. TensorFlow's gradient of a softmax is made from its float32 result, which therefore stays in memory until the
backward pass: of GPT-2 124M with 32 x 1024 tokens 1.6 GB a layer, written once more as half of that for the product.
On an H200 38 of a step's 124 ms went there (docs/gpus.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_layers

_HALF = (tf.float16, tf.bfloat16)


def keep_softmax_short(model: keras.Model) -> None:
    """Lets every softmax of the model that only a cast to half precision takes keep that for its gradient.

    The forward pass is the same bit for bit. The gradient differs by as much as half precision rounds. Saved files are
    left as they are. For a model of Keras' functional API; others are not looked into.
    """
    for softmax, dtype in keras_layers.softmaxes_cast(model):
        if tf.as_dtype(dtype) in _HALF:
            softmax.call = _keeping(softmax.axis, tf.as_dtype(dtype), softmax.call)


def _keeping(axis: int | None, dtype: tf.DType, composed: Callable) -> Callable:
    def call(x: Any) -> Any:
        is_plain = isinstance(x, tf.Tensor) and x.dtype == tf.float32
        return short_softmax(x, axis, dtype) if is_plain and isinstance(axis, int) else composed(x)

    return call


def short_softmax(x: tf.Tensor, axis: int, dtype: tf.DType) -> tf.Tensor:
    """The softmax of a float32 tensor, in float32, of which only the cast to `dtype` is kept for the gradient."""

    @tf.custom_gradient
    def softmax(x: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        y = tf.nn.softmax(x, axis)
        kept = tf.cast(y, dtype)

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            weights = tf.cast(kept, x.dtype)
            return weights * (upstream - tf.reduce_sum(upstream * weights, axis, keepdims=True))

        return y, gradient

    weights: Any = softmax(x)  # without the gradient, which its type has beside it
    return weights
