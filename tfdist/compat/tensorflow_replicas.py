"""Values of the replicas of one process in a tf.function, where there is no public way to them (TensorFlow 2.21)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.values import PerReplica


def per_replica(values: tuple) -> Any:
    """Returns a per-replica value, made of one value for each replica. Relies on tensorflow.python's `PerReplica`;
    without it a process cannot have several replicas."""
    return PerReplica(values)


def order_tokens(strategy: Any) -> list[tf.Variable]:
    """The variables with which a strategy keeps its collectives in one order; each collective sets one. Relies on the
    `_launchers` of its cross-device operations; without them steps are reported to set a variable that no snapshot
    holds.
    """
    held = ("_collective_ops", "_cross_device_ops", "_host_cross_device_ops")
    launchers = [each for name in held for each in getattr(getattr(strategy.extended, name, None), "_launchers", ())]
    return [each._ordering_token for each in launchers if each._ordering_token is not None]


def of_this_replica(variable: Any) -> Any:
    """The copy of a mirrored variable that belongs to the replica being traced; returns any other value as it is.

    Relies on `DistributedVariable._get`; without it rows are gathered from the first replica's copy of a table.
    """
    return variable._get() if hasattr(variable, "_get") else variable


@contextlib.contextmanager
def own_first_values(strategy: Any) -> Iterator[None]:
    """Context manager in which new variables start with this worker's values: MultiWorkerMirroredStrategy does not send
    the chief's, each in its own collective, which took a tenth of the start of a small run.

    Relies on `_num_workers` of the strategy's extension; without it the chief's values are sent twice. Also relies on
    `_collective_keys`, which count a collective for each variable although none is sent; without them workers that make
    more variables than others wait for a collective that nobody else will ever call.
    """
    extended = strategy.extended
    workers, keys = (getattr(extended, name, None) for name in ("_num_workers", "_collective_keys"))
    if workers is not None:
        extended._num_workers = 1
    if keys is not None:
        extended._collective_keys = type(keys)()
    try:
        yield
    finally:
        if workers is not None:
            extended._num_workers = workers
        if keys is not None:
            extended._collective_keys = keys
