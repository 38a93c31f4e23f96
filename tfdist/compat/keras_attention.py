"""The function with which Keras' layers and operations compute attention, and how to give them another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras.src.backend.tensorflow import nn
from keras.src.ops.nn import DotProductAttention

Attention = Callable[..., Any]  # (query, key, value, bias, mask, scale, is_causal, flash_attention, soft cap) -> output

_of_keras: Attention | None = getattr(nn, "dot_product_attention", None)


def replace_attention(made_of: Callable[[Attention], Attention]) -> None:
    """From now on MultiHeadAttention, GroupedQueryAttention and `keras.ops.dot_product_attention` compute by
    `made_of(Keras' own function)`. Calls to it change nothing more if they give the same.

    Relies on `dot_product_attention` of keras.src's TensorFlow backend; without it attention stays Keras' own.
    """
    if _of_keras is not None:
        nn.dot_product_attention = made_of(_of_keras)


def wants_none() -> bool:
    """Whether the user has turned fused attention off (`keras.config.disable_flash_attention()`)."""
    return keras.config.is_flash_attention_enabled() is False


def attentions(model: keras.Model) -> list[Any]:
    """The operations `keras.ops.dot_product_attention` of a functional model. Relies on `Functional.operations` and the
    class `DotProductAttention`; without them none is found.
    """
    return [each for each in getattr(model, "operations", []) if type(each) is DotProductAttention]
