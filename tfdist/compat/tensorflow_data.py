"""The operations that make up a tf.data.Dataset (TensorFlow 2.21)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing

from tfdist.compat.tensorflow_graphs import nodes_of


def with_inputs(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields the dataset and all datasets that it reads from. Relies on `Dataset._inputs`; without it no dataset's
    position could be restored without reading again everything before it.
    """
    yield dataset
    for source in dataset._inputs():
        yield from with_inputs(source)


def inputs_of(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The datasets that the dataset reads from. Relies on `Dataset._inputs`, see with_inputs."""
    return list(dataset._inputs())


def drops_a_remainder(dataset: tf.data.Dataset) -> bool:
    """Whether the dataset makes batches and leaves out a last one that is smaller. Relies on `_drop_remainder`; without
    it some validations of which a resumed fit reads other rows would be noticed only by their results."""
    drops = getattr(dataset, "_drop_remainder", False)
    return bool(tf.get_static_value(drops) if isinstance(drops, tf.Tensor) else drops)


def tell_of_iterators(listener: Callable[[tf.data.Dataset], None]) -> None:
    """From now on `listener` is called with each dataset of which Python code makes an iterator, before it is made.
    Not where a tf.function loops over a dataset, which TensorFlow does without `__iter__`."""
    make = tf.data.Dataset.__iter__
    if vars(make).get(_LISTENER) is listener:
        return

    def make_told(dataset: tf.data.Dataset) -> Any:
        listener(dataset)
        return make(dataset)

    setattr(make_told, _LISTENER, listener)
    setattr(tf.data.Dataset, "__iter__", make_told)  # noqa: B010 - it replaces a method


_LISTENER = "tfdist_listener"


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


# Operations that draw an order, and the place of `seed` among their inputs; `seed2` comes next.
_SEEDS_AT = {"ShuffleDataset": 2, "ShuffleDatasetV3": 2, "RandomDataset": 0, "RandomDatasetV2": 0}
_BATCHES = {"BatchDataset", "ParallelBatchDataset", "PaddedBatchDataset"}
_OF_DATASETS = {"FlatMapDataset", "InterleaveDataset", "ParallelInterleaveDataset"}  # their functions make datasets


def seeds_of_order(dataset: tf.data.Dataset, unbatched: int = 0, chooses: bool = False) -> list[list[int | None]]:
    """The two seeds of all that draws the order of a dataset: shuffles, random numbers that choose (as in
    `sample_from_datasets`), both also in functions, and `tf.random.shuffle` of rows that become elements. [0, 0]:
    without a seed; None: computed in a function. Not seen in datasets that functions have captured.

    unbatched: how many levels of rows of its elements become elements. chooses: whether its elements say from which
    dataset the next one is taken. Relies on `_seed` and `_seed2` of tensorflow.python's datasets, and on
    `Dataset._inputs`, of which the first of a DirectedInterleaveDataset chooses; without them a fit may resume within
    an epoch in another order.
    """
    found: list[list[int | None]] = []
    here = kind(dataset)
    if here == "ShuffleDataset" or (here == "RandomDataset" and chooses):
        found.append([int(dataset._seed), int(dataset._seed2)])
    for used in functions(dataset):
        graph = used.function.graph.as_graph_def()
        drawn = [seeds for called in graph.library.function for seeds in _seeds_among(called.node_def)]
        # Not those of other functions, also of maps in functions: they change a sample, not the order.
        ordering = nodes_of(graph) if unbatched else graph.node if here in _OF_DATASETS else ()
        drawn += [[node.attr["seed"].i, node.attr["seed2"].i] for node in ordering if node.op == "RandomShuffle"]
        # Sorted: functions come by a hash of their names, with numbers that another process may give otherwise.
        found += sorted([*_seeds_among(graph.node), *drawn], key=str)
    unbatched = max(0, unbatched + (here == "UnbatchDataset") - (here in _BATCHES))
    for place, source in enumerate(dataset._inputs()):
        found += seeds_of_order(source, unbatched, chooses or (here == "DirectedInterleaveDataset" and not place))
    return found


def _seeds_among(nodes: Any) -> list[list[int | None]]:
    """The seeds of the datasets that a function makes."""
    named = {node.name: node for node in nodes}

    def value(name: str) -> int | None:
        node = named.get(name.split(":")[0])
        if node is None or node.op not in ("Const", "SelectV2"):
            return None
        # A seed2 may be selected: if both seeds are 0, TensorFlow takes another one.
        return value(node.input[2]) if node.op == "SelectV2" else int(tf.make_ndarray(node.attr["value"].tensor))

    places = [(node, _SEEDS_AT[node.op]) for node in nodes if node.op in _SEEDS_AT]
    return [[value(node.input[at]), value(node.input[at + 1])] for node, at in places]


def shuffles_anew(dataset: tf.data.Dataset) -> bool:
    """Whether the dataset comes in another order at each pass, seeded or not. Relies on
    `_ShuffleDataset._reshuffle_each_iteration`; without it some shuffled data would be noticed only by their samples.
    """
    return kind(dataset) == "ShuffleDataset" and bool(dataset._reshuffle_each_iteration)


_MOST_BYTES = 2**26  # of tensors in memory that are copied to look at the operation that reads them


def in_any_order(dataset: tf.data.Dataset) -> bool:
    """Whether the dataset itself, or one that its functions make, was given deterministic=False: it yields what is
    ready first, whatever its options say. Not seen in datasets that its functions have captured.

    Relies on `_deterministic` of tensorflow.python's datasets, which those of `interleave` lack; without it samples of
    a map in parallel may come twice and never.
    """
    if getattr(dataset, "_deterministic", "") == "false":
        return True
    if any(map(_is_told_so, (used.function.graph.as_graph_def() for used in functions(dataset)))):
        return True
    if kind(dataset) != "ParallelInterleaveDataset":
        return False
    if _bytes_held(dataset) <= _MOST_BYTES:
        return _is_told_so(_as_graph(dataset))
    # An iterator tells, too, and copies nothing. But it would draw the next order of a shuffle.
    return not any(map(shuffles_anew, with_inputs(dataset))) and _is_run_so(dataset)


def _is_told_so(graph: Any) -> bool:
    return any(node.attr["deterministic"].s == b"false" for node in nodes_of(graph))


def _is_run_so(dataset: tf.data.Dataset) -> bool:
    """Whether an interleave of the dataset is run with deterministic=False, whatever the options say."""
    options = tf.data.Options()
    options.deterministic = options.autotune.enabled = True
    model = tf.data.experimental.get_model_proto(iter(dataset.with_options(options)))
    parameters = [parameter for node in model.nodes.values() for parameter in node.parameters]
    return any(each.name == "deterministic" and not each.value for each in parameters)


def _bytes_held(dataset: tf.data.Dataset) -> float:
    """The size of the tensors that the dataset is made of; infinite if its functions read datasets, whose size is not
    known. Relies on `_tensors` of the datasets of tensors; without it large ones would be copied."""
    parts = list(with_inputs(dataset))
    captured = [tensor for each in parts for used in functions(each) for tensor in used.function.captured_inputs]
    if any(tensor.dtype == tf.variant for tensor in captured):
        return math.inf
    held = [tensor for each in parts for tensor in getattr(each, "_tensors", ())]
    return sum(tensor.dtype.size * (tensor.shape.num_elements() or 0) for tensor in (*captured, *held))


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
