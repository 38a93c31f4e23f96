"""Softmax in float32 of which only a half-precision copy is used: the gradient keeps only that copy.

Attention uses it in this way (blocks.py): scores in float32, softmax, weights in bfloat16 or float16 for the product
with the values. TensorFlow computes the gradient of a softmax from its float32 result, which therefore stays in memory
until the backward pass: for GPT-2 124M with 32 x 1024 tokens 1.6 GB per layer, plus a half-precision copy of half that
size for the product. On an H200 38 of a step's 124 ms were spent on this (docs/speed_log.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_layers

_HALF = (tf.float16, tf.bfloat16)


def keep_softmax_short(model: keras.Model) -> None:
    """Makes every softmax of the model whose only use is a cast to half precision keep the cast result for its
    gradient.

    The forward pass is the same bit for bit. The gradient differs by the rounding of half precision. Saved files do not
    change. For models of Keras' functional API; others are not examined.
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
    """Returns the softmax of a float32 tensor, in float32; only its cast to `dtype` is kept for the gradient."""

    @tf.custom_gradient
    def softmax(x: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        y = tf.nn.softmax(x, axis)
        kept = tf.cast(y, dtype)

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            weights = tf.cast(kept, x.dtype)
            return weights * (upstream - tf.reduce_sum(upstream * weights, axis, keepdims=True))

        return y, gradient

    weights: Any = softmax(x)  # returns the softmax alone, although its type includes the gradient
    return weights
