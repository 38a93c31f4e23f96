"""The operations that make up a tf.data.Dataset (TensorFlow 2.21)."""

from __future__ import annotations

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


def is_stateful(operation: str) -> bool:
    """Whether an operation keeps state from one call to the next; also true if TensorFlow does not know the operation.
    Relies on tensorflow.python's `op_def_registry`.
    """
    definition = op_def_registry.get(operation)
    return definition is None or definition.is_stateful
