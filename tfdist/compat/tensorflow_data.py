"""The operations that make up a tf.data.Dataset (TensorFlow 2.21)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing
from tensorflow.python.framework import op_def_registry


def with_inputs(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields the dataset and all datasets that it reads from. Relies on `Dataset._inputs`; without it no dataset's
    position could be restored without reading again everything before it.
    """
    yield dataset
    for source in dataset._inputs():
        yield from with_inputs(source)


def kind(dataset: tf.data.Dataset) -> str:
    """The kind of a dataset, for example "MapDataset". Relies on the names of tensorflow.python's classes; an unknown
    name counts as a kind that may keep state."""
    return type(dataset).__name__.lstrip("_")


def paused(dataset: tf.data.Dataset, seconds: float) -> tf.data.Dataset:
    """Returns the dataset with a pause before each element and before its end; the pause is in a thread of tf.data, and
    can be interrupted. Relies on tensorflow.python's `testing.sleep`; without it a wait for bytes of a file would block
    one of the few threads that run operations, including those of the training step.
    """
    pause: Any = testing.sleep(int(seconds * 1e6))
    return dataset.apply(pause)


def functions(dataset: tf.data.Dataset) -> list[Any]:
    """The user's functions that the dataset calls, each with its graph as `.function.graph`. Relies on
    `Dataset._functions`."""
    return dataset._functions()


def seeds_of(dataset: tf.data.Dataset) -> list[int]:
    """The seeds of a dataset that shuffles; empty for others. Relies on `_ShuffleDataset._seed` and `_seed2`; without
    them a fit may resume within an epoch in another order."""
    return [int(dataset._seed), int(dataset._seed2)] if kind(dataset) == "ShuffleDataset" else []


def shuffles_without_a_seed(dataset: tf.data.Dataset) -> bool:
    """Whether the dataset draws a new order each time. Relies on `_ShuffleDataset._seed` and `_seed2`, both 0 without a
    seed; without them a resumed run would not warn that samples may come twice.
    """
    return seeds_of(dataset) == [0, 0]


def shuffles_anew(dataset: tf.data.Dataset) -> bool:
    """Whether the dataset comes in another order at each pass, seeded or not. Relies on
    `_ShuffleDataset._reshuffle_each_iteration`; without it some shuffled data would be noticed only by their samples.
    """
    return kind(dataset) == "ShuffleDataset" and bool(dataset._reshuffle_each_iteration)


_MOST_BYTES = 2**29  # of tensors in memory that are copied to look at the operation that reads them


def in_any_order(dataset: tf.data.Dataset) -> bool:
    """Whether the dataset itself, or one that its functions make or read, was given deterministic=False: it yields what
    is ready first, whatever its options say. Not seen in a parallel interleave of more than `_MOST_BYTES`.

    Relies on `_deterministic` of tensorflow.python's datasets, which those of `interleave` lack; without it samples of
    a map in parallel may come twice and never.
    """
    if getattr(dataset, "_deterministic", "") == "false":
        return True
    called = [each.function for each in functions(dataset)]
    graphs = [each.graph.as_graph_def() for each in called]
    reads_others = any(tensor.dtype == tf.variant for each in called for tensor in each.captured_inputs)
    if (reads_others or kind(dataset) == "ParallelInterleaveDataset") and _bytes_held(dataset) <= _MOST_BYTES:
        graphs.append(_as_graph(dataset))
    return any(node.attr["deterministic"].s == b"false" for graph in graphs for node in nodes_of(graph))


def nodes_of(graph: Any) -> list[Any]:
    """The nodes of a GraphDef, and those of the functions in its library."""
    return [*graph.node, *(node for called in graph.library.function for node in called.node_def)]


def _bytes_held(dataset: tf.data.Dataset) -> int:
    """The size of the tensors that the dataset is made of, as far as it can be seen. Relies on `_tensors` of the
    datasets of tensors; without it large ones would be copied."""
    held = [tensor for each in with_inputs(dataset) for tensor in getattr(each, "_tensors", ())]
    held += [
        tensor for each in with_inputs(dataset) for used in functions(each) for tensor in used.function.captured_inputs
    ]
    return sum(tensor.dtype.size * (tensor.shape.num_elements() or 0) for tensor in held)


def _as_graph(dataset: tf.data.Dataset) -> Any:
    """The dataset, with all that it reads from, as a GraphDef; an empty one if TensorFlow cannot describe it."""
    graph = tf.compat.v1.GraphDef()
    with contextlib.suppress(tf.errors.OpError):
        described = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=1,  # of seeds, files and Python functions: ignored
        )
        graph.ParseFromString(described.numpy())
    return graph


def is_stateful(operation: str) -> bool:
    """Whether an operation keeps state from one call to the next; also true if TensorFlow does not know the operation.
    Relies on tensorflow.python's `op_def_registry`.
    """
    definition = op_def_registry.get(operation)
    return definition is None or definition.is_stateful
