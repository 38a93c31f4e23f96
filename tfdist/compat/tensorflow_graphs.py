"""Operations in a graph: their order, and edges that are added once they are made (TensorFlow 2.21)."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def operation_number(operation: tf.Operation) -> int:
    """Operations of a graph are numbered as they are made. Relies on `Operation._id`; without it the order in which
    gradients are computed is left to TensorFlow, and fewer of them travel while the backward pass goes on.
    """
    return operation._id


def compute_after(operation: tf.Operation, first: tf.Operation) -> None:
    """From now on `operation` waits for `first`, of the same graph. Relies on `Operation._add_control_input`."""
    operation._add_control_input(first)


def function_graph(name: str) -> tf.Graph:
    """A graph as that of a tf.function, in which code runs without being traced by one: variables are made outside of
    it, and what is outside can be used. Relies on `tf.__internal__.FuncGraph`.
    """
    return tf.__internal__.FuncGraph(name)


def captured_by(graph: tf.Graph) -> list[Any]:
    """What a `function_graph` uses from outside of it, in the order of first use. Relies on `FuncGraph.captures`."""
    return [outside for outside, _ in graph.captures]
