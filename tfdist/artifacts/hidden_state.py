"""Finds state in layers that Keras does not know of: a tf.Variable or a tf.random.Generator among their attributes, or
in the objects they are made with (activations, regularizers, constraints, and variables in closures of functions).

Keras neither saves nor restores such state: a resumed run would compute something else, and nobody would notice.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_layers, keras_optimizers, keras_trainer, keras_variables
from tfdist.compat.code_origin import is_of_keras, module_of, package_of
from tfdist.compat.object_attributes import attributes_of

_DEPTH = 4  # nesting depth of lists, dictionaries and objects
_DEPTH_BESIDE = 8  # the same for objects that are not layers, which are few
_MOST = 10_000  # entries of a list that are searched: longer lists are data
# Packages of objects that contain nothing of the user's.
_NOT_OWN = ("keras", "tensorflow", "tfdist", "numpy", "builtins", "functools", "inspect", "enum", "_thread")
_OF_TENSORS = (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)
_TRACKED = (keras.Layer, keras.random.SeedGenerator)  # Keras tracks these in layers
_PLAIN = {bool, int, float, str, bytes, type(None)}  # types of most attributes: testing for them first saves time


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
    found = [one for rule in rules for one in _inside(rule, _DEPTH)]
    return [each for one in found if isinstance(one, (tf.Variable, tf.random.Generator)) for each in _variables_of(one)]


def variables_of_model(model: keras.Model) -> list[keras.Variable | tf.Variable]:
    """The variables that all workers of tfdist.fit hold alike, and that a backup holds: including those that Keras does
    not know of, in layers and in the losses and metrics that `compile` was given."""
    hidden = hidden_state(model)
    return [*model.variables, *hidden, *state_beside_layers(model, hidden)]


def state_beside_layers(model: keras.Model, hidden: Sequence[tf.Variable]) -> list[tf.Variable]:
    """The variables in the losses, metrics and the optimizer given to `compile` (such as a schedule with its own
    variable) that neither the model nor the optimizer knows. Excludes what Keras' own metrics hold, and what Keras
    makes at the first batch for metrics derived from them: it is reset at each epoch. hidden: the `hidden_state` of
    the model."""
    of_optimizers, _ = _optimizers(model)
    return _beside_layers(model, hidden, of_optimizers)


def state_of_losses(model: keras.Model, hidden: Sequence[tf.Variable]) -> list[tf.Variable]:
    """Those of `state_beside_layers` that losses and metrics hold."""
    return _beside_layers(model, hidden, ())


def _beside_layers(
    model: keras.Model, hidden: Sequence[tf.Variable], of_optimizers: Sequence[Any]
) -> list[tf.Variable]:
    losses = keras.tree.flatten(getattr(model, "loss", None))
    metrics = keras_trainer.given_metrics(model)
    own_metrics = [each for each in metrics if not (isinstance(each, keras.metrics.Metric) and is_of_keras(each))]
    functions = [keras_trainer.function_and_options(each)[0] for each in metrics if _is_wrapper(each)]
    _, counted = _optimizers(model)
    made_late = [one for each in own_metrics if keras_trainer.made_at_the_first_batch(each) for one in each.variables]
    known = {id(one) for one in (*map(keras_variables.stored_value, (*counted, *made_late)), *hidden)}
    return [each for each in held_by([*losses, *own_metrics, *functions, *of_optimizers]) if id(each) not in known]


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
    for one in (each for value in objects for each in _inside(value, _DEPTH_BESIDE, seen)):
        found |= {id(each): each for each in _variables_of(one)}
    return list(found.values())


def _variables_of(one: Any) -> list[tf.Variable]:
    """The variables of one object that `_inside` yields."""
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
    """The variables of all metrics: the model's, those that layers hold, and those that `compile` was given."""
    return variables_of_metrics([*model.metrics, *metrics_held(model), *keras_trainer.compiled_metrics(model)])


def metrics_held(layer: keras.Layer) -> list[keras.metrics.Metric]:
    """The metrics that the layer, or a layer inside it, holds; they are local to a worker."""
    return [each for each in _held(layer) if isinstance(each, keras.metrics.Metric)]


def tensors_in(value: Any) -> list[tf.Tensor]:
    """The tensors in a value: in containers, and in objects of the user's own classes; not in layers."""
    return [] if type(value) in _PLAIN else list(_tensors_in(value, _DEPTH, set()))


def _tensors_in(value: Any, depth: int, seen: set[int]) -> Iterator[tf.Tensor]:
    if isinstance(value, tf.Tensor):
        yield value
    elif isinstance(value, _OF_TENSORS):
        yield from tf.nest.flatten(value, expand_composites=True)
    elif type(value) not in _PLAIN and not isinstance(value, keras.Layer) and id(value) not in seen and depth:
        seen.add(id(value))
        is_container = isinstance(value, (list, tuple, dict))
        for each in _parts(value):
            yield from _tensors_in(each, depth if is_container else depth - 1, seen)


def _held(layer: keras.Layer) -> list[tf.Variable | tf.random.Generator | keras.metrics.Metric]:
    """The variables, generators and metrics in layers, in the order of the layers and of their attributes."""
    found: dict[int, Any] = {}
    for each in keras_layers.all_layers(layer):
        for value in (*vars(each).values(), *_rules(each)):
            found |= {id(one): one for one in _inside(value, _DEPTH) if not isinstance(one, _TRACKED)}
    return list(found.values())


def _rules(layer: keras.Layer) -> list[Any]:
    """The regularizers and constraints of the layer's weights, which need not be attributes of the layer."""
    return [part for variable in layer.weights for part in (variable.regularizer, variable.constraint)]


def _inside(value: Any, depth: int, seen: dict[int, Any] | None = None) -> Iterator[Any]:
    """Yields variables, generators, metrics and layers. seen: objects by id that were searched, and are not again."""
    if type(value) in _PLAIN:
        return
    if isinstance(value, (tf.Variable, tf.random.Generator, keras.metrics.Metric, *_TRACKED)):
        yield value
        return
    if isinstance(value, keras.Variable):
        if (stored := keras_variables.stored_value(value)) is not None:
            yield stored
        return
    if seen is not None:
        if id(value) in seen:
            return
        seen[id(value)] = value
    for each in _parts(value) if depth else ():
        yield from _inside(each, depth - 1, seen)


def _parts(value: Any) -> Iterable[Any]:
    """The objects inside a user-defined value, in an order that is the same in every process; else none."""
    if isinstance(value, (list, tuple, collections.deque)):
        return value if len(value) <= _MOST else ()
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, tf.types.experimental.PolymorphicFunction):
        decorated: Any = value
        value = decorated.python_function
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    is_not_own = (
        package_of(module_of(value)) in _NOT_OWN
        and not isinstance(value, keras.losses.Loss)
        and type(value) is not tf.Module
    )
    if isinstance(value, type) or is_not_own:
        return ()
    if isinstance(value, types.FunctionType):
        return _closed_over(value)
    return attributes_of(value).values()


def _closed_over(function: types.FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            found.append(cell.cell_contents)
    return found
