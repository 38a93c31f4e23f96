"""Handles layers and models whose `call` is a tf.function, which would keep a trace that a trial has made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_layers
from tfdist.control.exit_codes import ConfigError


def traced_anew(call: Any) -> Callable | None:
    """Returns a replacement for a tf.function that makes a new tf.function at each call. Returns None if `call` is not
    a tf.function.

    In a trial of a model no Dropout drops anything, and BatchNormalization uses moments of a worker's own rows: if the
    function kept that trace, a step with the same shapes would do the same.
    """
    if not isinstance(call, tf.types.experimental.PolymorphicFunction):
        return None
    function: Any = call
    return lambda *args, **kwargs: tf.function(function.python_function)(*args, **kwargs)


def trace_anew(model: keras.Model) -> None:
    """Replaces `call` in all layers of the model with `traced_anew(call)`, where it is a tf.function."""
    for layer in keras_layers.all_layers(model):
        if anew := traced_anew(layer.call):
            object.__setattr__(layer, "call", anew)


def refuse_batch_norm(model: keras.Model) -> None:
    """Raises ConfigError if BatchNormalization would communicate with other replicas inside such a function: the order
    in which functions run is not determined."""
    for layer in keras_layers.all_layers(model):
        if _is_in_a_function(layer) and any(
            isinstance(inner, keras.layers.BatchNormalization) for inner in keras_layers.all_layers(layer)
        ):
            raise ConfigError(
                f"The call of {type(layer).__name__} {layer.name} is a tf.function, and BatchNormalization in it cannot"
                " take its moments over several workers: remove @tf.function, as the whole step is one anyway."
            )


def _is_in_a_function(layer: keras.Layer) -> bool:
    return isinstance(getattr(type(layer), "call", None), tf.types.experimental.PolymorphicFunction)
