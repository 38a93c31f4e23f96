"""The operations of which a tf.data.Dataset is made (TensorFlow 2.21)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing
from tensorflow.python.framework import op_def_registry


def with_inputs(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """The dataset and all that it reads from. Relies on `Dataset._inputs`; without it the position of no dataset could
    be restored without reading again what came before it.
    """
    yield dataset
    for source in dataset._inputs():
        yield from with_inputs(source)


def kind(dataset: tf.data.Dataset) -> str:
    """The kind of a dataset, for example "MapDataset". Relies on the names of tensorflow.python's classes; a name that
    is not known counts as a kind that may keep something."""
    return type(dataset).__name__.lstrip("_")


def paused(dataset: tf.data.Dataset, seconds: float) -> tf.data.Dataset:
    """The dataset, which stands still before each element, and before its end; in a thread of tf.data's, and it can be
    stopped meanwhile. Relies on tensorflow.python's `testing.sleep`; without it what waits for bytes of a file would
    hold one of the few threads that run operations, the training step's among them.
    """
    pause: Any = testing.sleep(int(seconds * 1e6))
    return dataset.apply(pause)


def functions(dataset: tf.data.Dataset) -> list[Any]:
    """The user's functions that it calls, each with its graph as `.function.graph`. Relies on `Dataset._functions`."""
    return dataset._functions()


def shuffles_without_a_seed(dataset: tf.data.Dataset) -> bool:
    """Whether it draws a new order each time. Relies on `_ShuffleDataset._seed` and `_seed2`, both 0 without a seed;
    without them a resumed run would not warn that samples may come twice.
    """
    return kind(dataset) == "ShuffleDataset" and not (int(dataset._seed) or int(dataset._seed2))


def is_stateful(operation: str) -> bool:
    """Whether an operation keeps something from one call to the next; also if TensorFlow does not know it. Relies on
    tensorflow.python's `op_def_registry`.
    """
    definition = op_def_registry.get(operation)
    return definition is None or definition.is_stateful
