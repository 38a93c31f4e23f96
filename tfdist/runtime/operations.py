"""Every collective that a runtime has, under one name each, to be measured by communication/measure.py.

A further runtime is an entry in COLLECTIVES_OF; a further operation is an entry of its runtimes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfdist.control.cluster import Cluster
from tfdist.runtime.base import Runtime
from tfdist.runtime.collectives import Group


@dataclass(frozen=True)
class Collective:
    """One of `in_graph` and `on_host` is set."""

    through: str  # what carries the bytes
    in_graph: Callable[[tf.Tensor], tf.Tensor] | None = (
        None  # of a replica's tensor, float32 [k], inside the `fn` of `run`
    )
    on_host: Callable[[np.ndarray], np.ndarray] | None = None  # of an array, float32 [k], between steps


def members(runtime: Runtime) -> int:
    """How many take part: all workers of a mesh, whatever its axes, and otherwise all replicas."""
    return runtime.size if runtime.name == "mesh" else runtime.replicas


def collectives(runtime: Runtime, cluster: Cluster) -> dict[str, Collective]:
    """name -> collective over all members. The same on every worker; the call itself may be a collective."""
    return COLLECTIVES_OF[runtime.name](runtime, cluster)


def _of_group(group: Group) -> dict[str, Collective]:
    """TensorFlow's operations, as the mesh uses them."""
    through = _tensorflow()
    return {
        "all_reduce": Collective(through, group.all_reduce),
        "all_gather": Collective(through, group.all_gather),
        "reduce_scatter": Collective(through, group.reduce_scatter),
        "all_to_all": Collective(through, lambda x: group.all_to_all(tf.reshape(x, [group.size, -1]))),
        "broadcast": Collective(through, lambda x: group.broadcast(x, group.ranks[0])),
    }


def _of_mesh(runtime, cluster: Cluster) -> dict[str, Collective]:
    return _of_group(runtime.group_of(range(runtime.size)))


def _of_strategy(runtime, cluster: Cluster) -> dict[str, Collective]:
    """all_reduce and all_gather are those of tf.distribute, or the ring where gradients travel through it; it has no
    others, so the others are TensorFlow's bare operations, which know one replica per worker."""
    found = {}
    if runtime.local_replicas == 1:
        found = _of_group(
            Group(
                range(runtime.size),
                runtime.rank,
                tasks=[cluster.task(rank) for rank in range(runtime.size)],
                nccl=bool(tf.config.list_logical_devices("GPU")),
            )
        )
    return {
        **found,
        "all_reduce": Collective(_RING if runtime.uses_ring else _tensorflow(), lambda x: runtime.all_reduce([x])[0]),
        "all_gather": Collective(
            _tensorflow(), lambda x: tf.distribute.get_replica_context().all_gather(x, axis=0, options=runtime.options)
        ),
    }


def _of_horovod(runtime, cluster: Cluster) -> dict[str, Collective]:
    import horovod.tensorflow as hvd

    through = (
        "Horovod, NCCL"
        if hvd.nccl_built() and tf.config.list_logical_devices("GPU")
        else "Horovod, Gloo"
        if hvd.gloo_enabled()
        else "Horovod, MPI"
    )
    return {
        "all_reduce": Collective(through, lambda x: runtime.all_reduce([x])[0]),
        "all_gather": Collective(through, hvd.allgather),
        "reduce_scatter": Collective(through, lambda x: hvd.reducescatter(x, op=hvd.Sum)),
        "all_to_all": Collective(through, hvd.alltoall),
        "broadcast": Collective(through, lambda x: hvd.broadcast(x, 0)),
    }


def _of_sockets(runtime, cluster: Cluster) -> dict[str, Collective]:
    return {
        "all_reduce": Collective(_RING, lambda x: runtime.all_reduce([x])[0]),
        "all_gather": Collective(_RING, lambda x: runtime.gather([x])[0]),
        "broadcast": Collective(_RING, on_host=lambda array: runtime.broadcast([array])[0]),
    }


_RING = "our ring"  # over TCP, and with --communication=auto through memory within a host
COLLECTIVES_OF: dict[str, Callable[[Runtime, Cluster], dict[str, Collective]]] = {
    "mesh": _of_mesh,
    "horovod": _of_horovod,
    "multi_worker": _of_strategy,
    "sockets": _of_sockets,
}


def _tensorflow() -> str:
    return "TensorFlow, NCCL" if tf.config.list_logical_devices("GPU") else "TensorFlow, gRPC"
