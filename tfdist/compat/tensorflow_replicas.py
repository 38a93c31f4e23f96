"""Values of the replicas of one process in a tf.function, where there is no public way to them (TensorFlow 2.21)."""

from __future__ import annotations

from typing import Any

from tensorflow.python.distribute.values import PerReplica


def per_replica(values: tuple) -> Any:
    """One per-replica value of a value for each replica. Relies on tensorflow.python's `PerReplica`; without it a
    process cannot have several replicas.
    """
    return PerReplica(values)


def of_this_replica(variable: Any) -> Any:
    """The copy of a mirrored variable that belongs to the replica that is being traced; any other value as it is.

    Relies on `DistributedVariable._get`; without it rows are gathered from the first replica's copy of a table.
    """
    return variable._get() if hasattr(variable, "_get") else variable
