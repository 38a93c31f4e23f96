"""Replaces the function with which Keras' layers and operations compute attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras.src.backend.tensorflow import nn

Attention = Callable[..., Any]  # (query, key, value, bias, mask, scale, is_causal, flash_attention, soft cap) -> output

_of_keras: Attention | None = getattr(nn, "dot_product_attention", None)


def replace_attention(made_of: Callable[[Attention], Attention]) -> None:
    """Makes MultiHeadAttention, GroupQueryAttention and `keras.ops.dot_product_attention` compute with `made_of(Keras'
    own function)`, whatever has replaced that function before.

    Relies on `dot_product_attention` of keras.src's TensorFlow backend; without it attention stays Keras' own.
    """
    if _of_keras is not None:
        nn.dot_product_attention = made_of(_of_keras)
