"""State that layers keep without Keras' knowing: a tf.Variable, or a tf.random.Generator, among their attributes, and
among those of what they are made with (activations, regularizers, constraints).

Keras neither saves nor restores it: a run that is resumed would compute something else, and nothing would tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_layers, keras_variables

_DEPTH = 4  # of lists, dictionaries and objects in each other
_MOST = 10_000  # entries of a list that are looked at: more are data
# Modules of objects that hold nothing of the user's own.
_NOT_OWN = ("keras.", "tensorflow.", "tfdist.", "numpy", "builtins", "functools")


def hidden_variables(layer: keras.Layer) -> list[tf.Variable]:
    """Variables of TensorFlow's that the layer, or one in it, holds; without those of generators."""
    held = _held(layer)
    if not held:
        return []
    known = {id(keras_variables.stored_value(one)) for one in layer.variables}  # those of --zero=3 have none
    known |= {id(each.state) for each in held if isinstance(each, tf.random.Generator)}
    return [each for each in held if isinstance(each, tf.Variable) and id(each) not in known]


def hidden_generators(layer: keras.Layer) -> list[tf.Variable]:
    """The states of each tf.random.Generator that the layer, or one in it, holds."""
    return [each.state for each in _held(layer) if isinstance(each, tf.random.Generator)]


def hidden_state(layer: keras.Layer) -> list[tf.Variable]:
    """Both."""
    return [*hidden_variables(layer), *hidden_generators(layer)]


def variables_of_rules(layer: keras.Layer) -> list[tf.Variable]:
    """Those that regularizers and constraints of weights hold, which are called beside the layers."""
    found = [one for each in keras_layers.all_layers(layer) for rule in _rules(each) for one in _inside(rule, _DEPTH)]
    return [one.state if isinstance(one, tf.random.Generator) else one for one in found]


def _held(layer: keras.Layer) -> list[tf.Variable | tf.random.Generator]:
    """In the order of the layers and of their attributes."""
    found: dict[int, Any] = {}
    for each in keras_layers.all_layers(layer):
        for value in (*vars(each).values(), *_rules(each)):
            found |= {id(one): one for one in _inside(value, _DEPTH)}
    return list(found.values())


def _rules(layer: keras.Layer) -> list[Any]:
    """The regularizers and constraints of its weights, which may be no attributes of the layer."""
    return [part for variable in layer.weights for part in (variable.regularizer, variable.constraint)]


def _inside(value: Any, depth: int) -> Iterator[tf.Variable | tf.random.Generator]:
    if isinstance(value, (tf.Variable, tf.random.Generator)):
        yield value
        return
    if isinstance(value, keras.Variable):
        if (stored := keras_variables.stored_value(value)) is not None:
            yield stored
        return
    more: Any = ()
    if isinstance(value, Mapping):
        more = value.values()
    elif isinstance(value, (list, tuple)):
        more = value if len(value) <= _MOST else ()
    elif not isinstance(value, (keras.Layer, type)) and not type(value).__module__.startswith(_NOT_OWN):
        more = getattr(value, "__dict__", {}).values()
    for each in more if depth else ():
        yield from _inside(each, depth - 1)
