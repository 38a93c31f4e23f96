"""Every collective that a runtime has, under one name each, to be measured by communication/measure.py.

In a graph: a function of this replica's tensor, float32 [k], called inside the `fn` of `run`. On the host: a function of
a NumPy array. A further runtime, or a further operation, is an entry in IN_GRAPH.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdist.runtime.base import Runtime

Operation = Callable[[tf.Tensor], tf.Tensor]


def _of_mesh(runtime) -> dict[str, Operation]:
    group = runtime.group_of(range(runtime.size))
    return {
        "all_gather": group.all_gather,
        "reduce_scatter": group.reduce_scatter,
        "all_to_all": lambda x: group.all_to_all(tf.reshape(x, [runtime.size, -1])),
        "broadcast": lambda x: group.broadcast(x, 0),
    }


def _of_horovod(runtime) -> dict[str, Operation]:
    import horovod.tensorflow as hvd

    return {
        "all_gather": hvd.allgather,
        "reduce_scatter": lambda x: hvd.reducescatter(x, op=hvd.Sum),
        "all_to_all": hvd.alltoall,
        "broadcast": lambda x: hvd.broadcast(x, 0),
    }


def _of_strategy(runtime) -> dict[str, Operation]:
    return {"all_gather": lambda x: tf.distribute.get_replica_context().all_gather(x, axis=0, options=runtime.options)}


# Runtime name -> its collectives beside all_reduce, which every runtime has.
IN_GRAPH: dict[str, Callable[[Runtime], dict[str, Operation]]] = {
    "mesh": _of_mesh,
    "horovod": _of_horovod,
    "multi_worker": _of_strategy,
    "mirrored": _of_strategy,
    "sockets": lambda runtime: {"all_gather": lambda x: runtime.gather([x])[0]},
}


def in_graph(runtime: Runtime) -> dict[str, Operation]:
    """name -> collective of float32 [k], inside the `fn` of `run`."""
    return {"all_reduce": lambda x: runtime.all_reduce([x])[0], **IN_GRAPH.get(runtime.name, lambda _: {})(runtime)}


def on_host(runtime: Runtime) -> dict[str, Callable[[np.ndarray], object]]:
    """name -> collective of an array, between steps; only those that are not `in_graph`."""
    return {} if "broadcast" in in_graph(runtime) else {"broadcast": lambda array: runtime.broadcast([array])}
