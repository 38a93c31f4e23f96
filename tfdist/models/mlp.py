"""The mlp model: dense layers with ReLU, on samples of any shape."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf
from keras import layers

from tfdist.control.exit_codes import ConfigError
from tfdist.models.inputs import dropout as drop
from tfdist.models.inputs import outputs, rate


def mlp(
    *, x_spec: tf.TensorSpec, num_outputs: int | None, widths: Sequence[int] = (128, 128), dropout: float = 0.0
) -> keras.Model:
    """Float x [B, ...], flattened -> Dense + ReLU for each of `widths` -> logits [B, num_outputs] float32.

    Raises ConfigError if the shape of x is unknown, x is not floating, or there is no number of outputs.
    """
    rate("mlp", dropout)
    if not isinstance(widths, list | tuple):
        raise ConfigError(f"--model=mlp got widths={widths!r}: write for example widths=(128,128), or () for no layer.")
    if not x_spec.shape.is_fully_defined() or not x_spec.dtype.is_floating:
        raise ConfigError(
            f"--model=mlp takes floating x of a known shape, but a sample's x is {x_spec.dtype.name} {x_spec.shape}:"
            " use another --model or --source."
        )
    inputs = keras.Input(tuple(x_spec.shape), dtype=x_spec.dtype.name, name="x")
    x = layers.Flatten(name="flatten")(inputs)
    for index, width in enumerate(widths):
        x = layers.Dense(width, activation="relu", kernel_initializer="he_normal", name=f"dense_{index:02d}")(x)
        x = drop(x, dropout, f"dropout_{index:02d}")
    logits = layers.Dense(outputs("mlp", num_outputs), dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name="mlp")
