"""Checks of the data that models get, and the layers at both ends that models share."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import keras
import tensorflow as tf

from tfdist.control.exit_codes import ConfigError
from tfdist.models.keras_untyped import layers


def image_input(model: str, x_spec: tf.TensorSpec) -> keras.KerasTensor:
    """Makes a Keras input [B, height, width, channels]. Raises ConfigError unless x is a floating image of known
    shape."""
    if x_spec.shape.rank != 3 or not x_spec.shape.is_fully_defined() or not x_spec.dtype.is_floating:
        raise ConfigError(
            f"--model={model} takes floating images [height, width, channels], but a sample's x is {_say(x_spec)}: use"
            " another --model or --source."
        )
    image: Any = keras.Input(tuple(x_spec.shape), dtype=x_spec.dtype.name, name="image")
    return image


def outputs(model: str, num_outputs: int | None) -> int:
    """Returns `num_outputs`. Raises ConfigError if it is None, or not an integer of at least 1."""
    if num_outputs is not None and (not isinstance(num_outputs, Integral) or num_outputs < 1):
        raise ConfigError(f"--model={model} got num_outputs={num_outputs}: it must be a whole number, at least 1.")
    if num_outputs is None:
        raise ConfigError(
            f"--model={model} needs a number of classes, which --source does not give: add it to the model's options,"
            " for example --model_args=num_outputs=10."
        )
    return int(num_outputs)


def rate(model: str, value: float) -> float:
    """Returns the dropout rate `value`. Raises ConfigError unless it is at least 0 and below 1."""
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigError(f"--model={model} got dropout={value}: it must be at least 0 and below 1.")
    return value


def dropout(x: keras.KerasTensor, value: float, name: str) -> keras.KerasTensor:
    """Applies a Dropout layer, or nothing at rate 0, so that a model without dropout has no random state to save."""
    return layers.Dropout(value, name=name)(x) if value else x


def float32_logits(x: keras.KerasTensor, name: str = "logits") -> keras.KerasTensor:
    """The last layer: casts to float32 under every precision policy, because the loss takes exponentials."""
    return layers.Activation("linear", dtype="float32", name=name)(x)


def _say(x_spec: tf.TensorSpec) -> str:
    return f"{x_spec.dtype.name} {x_spec.shape}"
