"""Traces a model with several numbers of rows, without running it; row_proof.py examines the traces."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.compat import keras_layers
from tfdist.compat.code_origin import package_of
from tfdist.compat.keras_tensors import mask_of
from tfdist.compat.tensorflow_graphs import (
    captured_by,
    filled_always,
    function_graph,
    graph_called_by,
    makers_of_gradients,
    operation_number,
)
from tfdist.compat.tensorflow_variables import writes_undone
from tfdist.runtime import batch_norm
from tfdist.training.row_checks.calm_layers import calmed
from tfdist.training.row_checks.model_probe import Take
from tfdist.training.row_checks.trial_scope import attributes_kept
from tfdist.training.stateless_call import stateless_call

_WITHOUT_ROWS = ("keras", "tensorflow", "tfdist")  # their custom gradients mix rows only if their outputs do


class Place(NamedTuple):
    """The place of a tensor: the number of its operation, and its number among the operation's outputs."""

    operation: int
    output: int


class Trace(NamedTuple):
    """The trace of a model, or of a function that it calls, with one number of rows. inputs: places of its arguments.
    outputs: places of its outputs and of their masks. captured: values from outside."""

    rows: int
    operations: Sequence[tf.Operation]
    inputs: list[Place]
    outputs: list[Place]
    losses: Sequence[Any]
    captured: Sequence[Any]
    has_own_gradients: bool  # has custom gradients of the user's, which no rule covers


def traced(model: keras.Model, x: Any, take: Take, training: bool, counts: Sequence[int]) -> list[Trace]:
    """Returns a trace for each number of rows, of a model that is built. x, take: as for row_mixing.mixes."""
    layers = list(keras_layers.all_layers(model))
    one, two = take(x, [0]), take(x, [0, 0])  # their dims show what has rows; rows of a whole batch may be large
    traces = []
    with writes_undone(), batch_norm.each_alone(), filled_always():
        for rows in counts:
            specs = keras.tree.map_structure(functools.partial(_spec, rows), one, two)
            with attributes_kept(layers, traced=True):
                traces.append(_traced_once(model, layers, specs, rows, training))
    return traces


def _spec(rows: int, one: tf.Tensor, two: tf.Tensor) -> tf.TensorSpec:
    """Returns the spec of an input with `rows` rows. one, two: examples of it with one row and with two."""
    return tf.TensorSpec(one.shape if one.shape == two.shape else [rows, *one.shape[1:]], one.dtype)


def _traced_once(model: keras.Model, layers: Sequence[keras.Layer], x: Any, rows: int, training: bool) -> Trace:
    losses: list[Any] = []

    def placeholder(value: Any) -> tf.Tensor:
        return tf.compat.v1.placeholder(value.dtype, value.shape)

    graph = function_graph("rows")
    with graph.as_default():
        x = keras.tree.map_structure(placeholder, x)
        weights, states = (
            [placeholder(variable) for variable in group]
            for group in (model.trainable_variables, model.non_trainable_variables)
        )
        with calmed(layers, lambda _, loss: losses.append(loss)):
            found = keras.tree.flatten(stateless_call(model, weights, states, x, training).outputs)
        masks = [mask for output in found if (mask := mask_of(output)) is not None]
    return _of_graph(graph, rows, keras.tree.flatten(x), [*found, *masks], losses, captured_by(graph))


def of_call(operation: tf.Operation, rows: int) -> Trace | None:
    """Returns a trace of the function that an operation calls; None if it calls none. rows: of the caller's trace."""
    called = graph_called_by(operation)
    return called and _of_graph(called.graph, rows, called.inputs, called.outputs)


def _of_graph(
    graph: tf.Graph,
    rows: int,
    inputs: Sequence[tf.Tensor],
    outputs: Sequence[tf.Tensor],
    losses: Sequence[Any] = (),
    captured: Sequence[Any] = (),
) -> Trace:
    operations = graph.get_operations()
    numbers = {operation_number(operation): number for number, operation in enumerate(operations)}

    def places(tensors: Sequence[tf.Tensor]) -> list[Place]:
        return [Place(numbers[operation_number(tensor.op)], tensor.value_index) for tensor in tensors]

    return Trace(rows, operations, places(inputs), places(outputs), losses, captured, _has_own_gradients(graph))


def _has_own_gradients(graph: tf.Graph) -> bool:
    return any(package_of(module) not in _WITHOUT_ROWS for module in makers_of_gradients(graph))
