"""Refuses layers that set weights in their own forward pass, as keras.layers.SpectralNormalization does, or state, as
keras.layers.BatchNormalization does.

Where a weight is sharded, cut into parts, held by two pipeline stages or by parameter servers, or used again in a
recomputation, the layer would set a copy that nothing reads: training would continue silently with wrong weights. So
such a layer is refused, by name, when it first sets one of these variables, which is while the step is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdist.artifacts.hidden_state import hidden_variables, variables_of_rules
from tfdist.compat import keras_layers, keras_variables
from tfdist.control.exit_codes import ConfigError

WHOLE = "must be whole, and set once, for that: drop the flag, or the layer"
ON_SERVERS = (
    "a worker would set in its own copy only, not on the servers: use another strategy, such as multi_worker, or drop"
    " the layer"
)
_SETTERS = ("assign", "assign_add", "assign_sub")


def refuse_assigned(
    model: keras.Model, variables: Iterable[keras.Variable | tf.Variable], flag: str, why_and_fix: str = WHOLE
) -> None:
    """Makes it a ConfigError, which names `flag`, if a layer of `model` sets one of `variables` while the layer is
    called. `variables` may be trainable, or state, including TensorFlow variables that only the layer itself keeps."""
    for variable in variables:
        name, like = _owner(model, variable), _like(variable)
        sentence = (
            f"{flag}, but layer {name} sets its weight {getattr(variable, 'path', variable.name)} in the forward"
            f" pass{like}, which {why_and_fix}."
        )
        stored = variable if isinstance(variable, tf.Variable) else keras_variables.stored_value(variable)
        for one in (variable, *([] if stored is None or stored is variable else [stored])):
            for setter in _SETTERS:
                setattr(one, setter, _refusing(getattr(one, setter), sentence))


def refuse_rules_with_state(model: keras.Model, flag: str, why_and_fix: str) -> None:
    """Raises ConfigError if a regularizer or constraint, which runs outside of the layers' calls, keeps a variable."""
    if found := variables_of_rules(model):
        raise ConfigError(
            f"{flag}, but a regularizer or constraint of the model keeps a variable of its own ({found[0].name}),"
            f" which {why_and_fix}."
        )


def _like(variable: keras.Variable | tf.Variable) -> str:
    return " (as SpectralNormalization does)" if isinstance(variable, keras.Variable) and variable.trainable else ""


def _owner(model: keras.Model, variable: keras.Variable | tf.Variable) -> str:
    """The name of the layer that keeps the variable."""
    layers = keras_layers.all_layers(model, include_self=False)
    if isinstance(variable, tf.Variable):  # outer layers, which come first, know it as well
        return next(layer.name for layer in [*reversed(layers), model] if _holds(layer, variable))
    for layer in layers:
        seeds = [generator.state for generator in keras_layers.own_seed_generators(layer)]
        held = [*keras_layers.own_trainable_variables(layer), *keras_layers.own_non_trainable_variables(layer), *seeds]
        if any(one is variable for one in held):
            return layer.name
    return model.name


def _holds(layer: keras.Layer, variable: tf.Variable) -> bool:
    return any(one is variable for one in hidden_variables(layer))


def _refusing(assign: Callable[..., Any], sentence: str) -> Callable[..., Any]:
    def refusing(*arguments: Any, **options: Any) -> Any:
        if keras_layers.is_inside_a_call():
            raise keras_layers.keep_message(ConfigError(sentence))
        return assign(*arguments, **options)

    return refusing
