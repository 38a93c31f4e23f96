"""Finds state in layers that Keras does not know of: a tf.Variable or a tf.random.Generator among their attributes, or
in the objects they are made with (activations, regularizers, constraints, and variables in closures of functions).

Keras neither saves nor restores such state: a resumed run would compute something else, and nobody would notice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.artifacts.objects_inside import DEPTH, TRACKED, objects_inside
from tfdist.compat import keras_layers, keras_optimizers, keras_trainer, keras_variables
from tfdist.compat.code_origin import is_of_keras

_DEPTH_BESIDE = 8  # nesting depth of objects that are not layers, which are few


def hidden_variables(layer: keras.Layer) -> list[tf.Variable]:
    """The TensorFlow variables that the layer, or a layer inside it, holds; without those of generators."""
    return _variables_among(layer, _held(layer))


def hidden_generators(layer: keras.Layer) -> list[tf.Variable]:
    """The state of each tf.random.Generator that the layer, or a layer inside it, holds."""
    return _generators_among(_held(layer))


def hidden_state(layer: keras.Layer) -> list[tf.Variable]:
    """The variables of `hidden_variables` and `hidden_generators`."""
    held = _held(layer)
    return [*_variables_among(layer, held), *_generators_among(held)]


def _variables_among(layer: keras.Layer, held: Sequence[Any]) -> list[tf.Variable]:
    if not held:
        return []
    # Variables of --zero=3 have none. An optimizer of a class of the user's own is searched like any object.
    known = {id(keras_variables.stored_value(one)) for one in (*layer.variables, *_of_compiled(layer))}
    known |= {id(state) for state in _generators_among(held)}
    return [each for each in held if isinstance(each, tf.Variable) and id(each) not in known]


def _generators_among(held: Sequence[Any]) -> list[tf.Variable]:
    return [each.state for each in held if isinstance(each, tf.random.Generator)]


def variables_of_rules(layer: keras.Layer) -> list[tf.Variable]:
    """The variables in regularizers and constraints of weights, which are called outside of the layers."""
    rules = [rule for each in keras_layers.all_layers(layer) for rule in _rules(each)]
    found = [one for rule in rules for one in objects_inside(rule, DEPTH)]
    return [each for one in found if isinstance(one, (tf.Variable, tf.random.Generator)) for each in _variables_of(one)]


def variables_of_model(model: keras.Model) -> list[keras.Variable | tf.Variable]:
    """The variables that all workers of tfdist.fit hold alike, and that a backup holds: including those that Keras does
    not know of, in layers, losses and metrics."""
    hidden = hidden_state(model)
    return [*model.variables, *hidden, *state_beside_layers(model, hidden)]


def state_beside_layers(model: keras.Model, hidden: Sequence[tf.Variable]) -> list[tf.Variable]:
    """The variables in the losses, the optimizer (such as a schedule with its own variable) and the metrics that
    neither the model nor the optimizer knows. Excludes what is reset at each epoch: what the metrics of Keras' classes
    hold that Keras resets, and what it makes at the first batch for metrics derived from them. hidden: the
    `hidden_state` of the model."""
    of_optimizers, _ = _optimizers(model)
    return _beside_layers(model, hidden, of_optimizers)


def state_of_losses(model: keras.Model, hidden: Sequence[tf.Variable]) -> list[tf.Variable]:
    """Those of `state_beside_layers` that losses and metrics hold."""
    return _beside_layers(model, hidden, ())


def _beside_layers(
    model: keras.Model, hidden: Sequence[tf.Variable], of_optimizers: Sequence[Any]
) -> list[tf.Variable]:
    losses = keras.tree.flatten(getattr(model, "loss", None))
    in_layers = metrics_in_layers(model)
    kept, metrics = _never_reset(model, in_layers), [*keras_trainer.given_metrics(model), *in_layers]
    own_metrics = [each for each in metrics if not (isinstance(each, keras.metrics.Metric) and is_of_keras(each))]
    functions = [keras_trainer.function_and_options(each)[0] for each in metrics if _is_wrapper(each)]
    _, counted = _optimizers(model)
    late = [each for each in own_metrics if keras_trainer.made_at_the_first_batch(each) and each not in kept]
    made_late = [one for each in late for one in each.variables]
    known = {id(one) for one in (*map(keras_variables.stored_value, (*counted, *made_late)), *hidden)}
    found = held_by([*losses, *own_metrics, *kept, *functions, *of_optimizers])
    return [each for each in found if id(each) not in known]


def state_of_optimizers(model: keras.Model) -> list[tf.Variable]:
    """The variables in the compiled optimizer, and in those that it holds, that its `variables` lack, and that do not
    belong to the model. It may make them with the others, in the first step."""
    of_optimizers, counted = _optimizers(model)
    known = set(map(id, map(keras_variables.stored_value, counted)))
    return [each for each in held_by(of_optimizers) if id(each) not in known]


def other_optimizers(model: keras.Model) -> list[keras.Optimizer]:
    """The optimizers that the model keeps beside the compiled one, as a GAN does."""
    compiled = getattr(model, "optimizer", None)
    return [each for each in keras_trainer.optimizers_of(model) if each is not compiled]


def state_of_other_optimizers(model: keras.Model) -> list[list[tf.Variable]]:
    """The variables of each of `other_optimizers`, but for those of `variables_of_model` and of earlier ones."""
    others = other_optimizers(model)
    if not others:
        return []
    counted = map(keras_variables.stored_value, (*model.variables, *_of_compiled(model)))
    known = set(map(id, (*counted, *hidden_state(model), *state_of_optimizers(model))))
    found = []
    for each in others:
        found.append([one for one in held_by(_attributes_of(_with_held([each]))) if id(one) not in known])
        known |= set(map(id, found[-1]))
    return found


def _optimizers(model: keras.Model) -> tuple[list[Any], list[keras.Variable]]:
    """Returns (what the attributes of the compiled optimizer and of those inside it hold, the variables that the model
    and the compiled optimizer know)."""
    return _attributes_of(compiled_optimizers(model)), [*model.variables, *_of_compiled(model)]


def _of_compiled(model: keras.Layer) -> list[keras.Variable]:
    """The variables that the compiled optimizer of the model knows; none for a layer."""
    compiled = getattr(model, "optimizer", None)
    return list(compiled.variables) if isinstance(compiled, keras.optimizers.Optimizer) else []


def compiled_optimizers(model: keras.Model) -> list[keras.Optimizer]:
    """The compiled optimizer, and those that it holds."""
    return _with_held(keras_optimizers.with_inner(getattr(model, "optimizer", None)))


def _with_held(optimizers: Sequence[keras.Optimizer]) -> list[keras.Optimizer]:
    """The optimizers, and those that they hold under any name."""
    found: dict[int, Any] = {}

    def look(values: Sequence[Any]) -> None:
        for each in keras_trainer.optimizers_in(values):
            if id(each) not in found:
                found[id(each)] = each
                look(list(vars(each).values()))

    look(list(optimizers))
    return list(found.values())


def _attributes_of(optimizers: Sequence[keras.Optimizer]) -> list[Any]:
    return [value for each in optimizers for value in vars(each).values()]


def held_by(objects: Iterable[Any]) -> list[tf.Variable]:
    """All variables, and states of generators, in objects other than layers; a metric or a layer among these objects
    contributes its variables, too."""
    found: dict[int, tf.Variable] = {}
    seen: dict[int, Any] = {}
    for one in (each for value in objects for each in objects_inside(value, _DEPTH_BESIDE, seen)):
        found |= {id(each): each for each in _variables_of(one)}
    return list(found.values())


def _variables_of(one: Any) -> list[tf.Variable]:
    """The variables of one object that `objects_inside` yields."""
    if isinstance(one, tf.Variable):
        return [one]
    if isinstance(one, tf.random.Generator):
        return [one.state]
    if isinstance(one, keras.random.SeedGenerator):
        variables = [one.state]
    elif isinstance(one, keras.metrics.Metric):
        variables = variables_of_metrics([one])
    else:
        variables = [*one.variables, *hidden_state(one)]
    stored = [each if isinstance(each, tf.Variable) else keras_variables.stored_value(each) for each in variables]
    return [each for each in stored if each is not None]


def _is_wrapper(value: Any) -> bool:
    return isinstance(value, keras.metrics.MeanMetricWrapper) and is_of_keras(value)


def variables_of_metrics(metrics: Sequence[keras.metrics.Metric]) -> list[keras.Variable | tf.Variable]:
    """The variables of metrics, including TensorFlow variables in user-defined metrics."""
    attributes = [value for each in metrics for value in vars(each).values() if not callable(value)]
    return [*(one for each in metrics for one in each.variables), *held_by(attributes)]


def metric_variables(model: keras.Model) -> list[keras.Variable | tf.Variable]:
    """The variables of all metrics that are reset: the model's, those that layers hold, and those that `compile` was
    given."""
    kept = _never_reset(model, metrics_in_layers(model))
    reset = [each for each in metrics_held(model) if each not in kept]
    return variables_of_metrics([*model.metrics, *reset, *keras_trainer.compiled_metrics(model)])


def metrics_held(layer: keras.Layer) -> list[keras.metrics.Metric]:
    """The metrics that the layer, or a layer inside it, holds; they are local to a worker."""
    return [each for each in _held(layer) if isinstance(each, keras.metrics.Metric)]


def metrics_in_layers(layer: keras.Layer) -> list[keras.metrics.Metric]:
    """Those of `metrics_held` that a call may update: all but those that Keras makes for a `compile`."""
    models = [each for each in keras_layers.all_layers(layer) if isinstance(each, keras.Model)]
    of_compile = {id(each) for model in models for each in keras_trainer.metrics_of_compile(model)}
    return [each for each in metrics_held(layer) if id(each) not in of_compile]


def _never_reset(model: keras.Model, in_layers: Sequence[keras.metrics.Metric]) -> list[keras.metrics.Metric]:
    """Those of `metrics_in_layers` that Keras does not know of, so that it does not reset them at each epoch: of an
    inner model, in an object, or left out of the user's own `metrics`."""
    reset = set(map(id, (*model.metrics, *keras_trainer.given_metrics(model))))
    return [each for each in in_layers if id(each) not in reset]


def _held(layer: keras.Layer) -> list[tf.Variable | tf.random.Generator | keras.metrics.Metric]:
    """The variables, generators and metrics in layers, in the order of the layers and of their attributes."""
    found: dict[int, Any] = {}
    for each in keras_layers.all_layers(layer):
        for value in (*vars(each).values(), *_rules(each)):
            found |= {id(one): one for one in objects_inside(value, DEPTH) if not isinstance(one, TRACKED)}
    return list(found.values())


def _rules(layer: keras.Layer) -> list[Any]:
    """The regularizers and constraints of the layer's weights, which need not be attributes of the layer."""
    return [part for variable in layer.weights for part in (variable.regularizer, variable.constraint)]
