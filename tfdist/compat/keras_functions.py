"""Replaces functions of Keras' TensorFlow backend that layers and operations call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras.src.backend.tensorflow import nn
from keras.src.ops import nn as operations

Function = Callable[..., Any]
MadeOf = Callable[[Function], Function]  # Keras' own function -> its replacement

_gelu: Function | None = getattr(nn, "gelu", None)
_layer_normalization: Function | None = getattr(operations, "_layer_normalization", None)


def replace_gelu(made_of: MadeOf) -> None:
    """Makes "gelu" and `keras.ops.gelu` compute with `made_of(Keras' own)`: (x, approximate) -> the same shape.

    Relies on `gelu` of keras.src's TensorFlow backend; without it gelu stays Keras' own.
    """
    if _gelu is not None:
        nn.gelu = made_of(_gelu)


def replace_layer_normalization(made_of: MadeOf) -> None:
    """Makes LayerNormalization and `keras.ops.layer_normalization` compute with `made_of(Keras' own)`: (x, gamma, beta,
    axis, epsilon, rms_scaling) -> the same shape.

    Relies on `_layer_normalization` of keras.src's operations; without it layer normalization stays Keras' own.
    """
    if _layer_normalization is not None:
        operations._layer_normalization = made_of(_layer_normalization)
