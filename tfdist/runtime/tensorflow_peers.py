"""Synchronous data parallelism of plain processes whose tensors travel through TensorFlow's own collectives.

These are NCCL's from GPU to GPU, or go over gRPC between CPUs.

What workers must agree on before a tensor travels (how many rows each has, that all hold the same batch) goes over the
ring of connections that all runtimes of plain processes have. So a traced step has two kinds of operations that wait
for other workers: collectives, and exchanges on that ring, which block a thread. An exchange waits for all collectives
that were traced before it: so a thread that is blocked in it cannot keep any of them from starting, even if it is the
only thread.

Gradients travel in buckets, the last layers' first, each as soon as its gradients are ready.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.compat import tensorflow_cluster
from tfdist.compat.tensorflow_interpreter_lock import interpreter_released
from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.control.packet_filter import own_address_only
from tfdist.runtime.bucketing import in_buckets
from tfdist.runtime.collective_timeout import Overdue
from tfdist.runtime.collectives import Group
from tfdist.runtime.host import on_host
from tfdist.runtime.operations import Collective, of_group
from tfdist.runtime.peer_watch import PeerWatch
from tfdist.runtime.peers import Peers
from tfdist.runtime.ring.control_ring import ControlRing
from tfdist.runtime.ring.ring_error import overdue
from tfdist.runtime.row_exchange import RowExchange
from tfdist.runtime.wire_types import joined, of_one_type, off_wire, on_wire

_SUMMED = (tf.float16, tf.bfloat16, tf.float32, tf.float64)  # summed by the collective itself


class TensorflowPeers(Peers):
    """Plain processes over TensorFlow's collectives; see PeerRuntime in runtime/base.py. Created by peer_choice.py,
    before TensorFlow has computed anything.

    nccl: whether tensors live on GPUs; otherwise all are in host memory.
    """

    def __init__(self, config: Config, cluster: Cluster, control: ControlRing, nccl: bool):
        super().__init__(cluster, control)
        self._nccl = nccl
        self._last: tf.Operation | None = None
        self._functions: dict[str, Callable] = {}
        self._pack_bytes = int(config.strategy.pack_mb * 2**20)
        with own_address_only(cluster.address, cluster.peers), interpreter_released():
            tensorflow_cluster.start_collectives(cluster)
        tasks = [cluster.task(rank) for rank in range(self.size)]
        self._group = Group(range(self.size), self.rank, tasks=tasks, nccl=nccl)
        self._rows = RowExchange(control, Group(range(self.size), self.rank, tasks=tasks, nccl=nccl, salt="rows "))
        self._group.meet(config.cluster.startup_timeout)
        timeout = config.strategy.collective_timeout
        self._overdue = Overdue(
            timeout,
            lambda: tensorflow_cluster.abort_collectives(overdue(self.rank, self.size, timeout)),
        )
        self._watch = PeerWatch(control.lost, self._overdue.is_waiting, tensorflow_cluster.abort_collectives)

    # -- inside a tf.function --------------------------------------------------------------------------------------

    def all_reduce(self, tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[Any]:
        tensors = list(tensors)
        open_ones = [place for place, tensor in enumerate(tensors) if not _is_of_static_shape(tensor)]
        others = [place for place in range(len(tensors)) if place not in open_ones]
        found: list[Any] = list(tensors)
        reduced = self._watched(self._here(self._sums_of_all), [tensors[place] for place in others]) if others else []
        for place, total in zip(others, reduced, strict=True):
            found[place] = total
        if open_ones:
            rows = self.gather([tf.convert_to_tensor(tensors[place])[tf.newaxis] for place in open_ones])
            for place, stack in zip(open_ones, rows, strict=True):
                found[place] = tf.reduce_sum(stack, 0)
        return found

    def stacked(self, tensor: tf.Tensor) -> tf.Tensor:
        if not tensor.shape.is_fully_defined():
            return self.gather([tensor[tf.newaxis]])[0]
        return self._watched(self._here(self._stacks), [tensor])[0]

    def gather(
        self, tensors: Sequence[tf.Tensor], same: Sequence[tf.Tensor] = (), stamp: Callable[[], int] = lambda: 0
    ) -> list[tf.Tensor]:
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        rows = self._rows.agree(tensors, same, stamp, after=self._previous())
        self._waits_from_here([rows.counts])
        found = self._watched(lambda tensors: self._rows.gather(tensors, rows), tensors)
        for all_rows, tensor in zip(found, tensors, strict=True):
            all_rows.set_shape([None, *tensor.shape[1:]])
        return found

    def _watched(self, run: Callable[[Sequence[Any]], list], tensors: Sequence[Any]) -> list[Any]:
        """Returns `run(tensors)`, which waits for other workers: under the watch, and before all later exchanges."""
        with contextlib.nullcontext() if self._nccl else on_host():
            found = self._overdue.watched(lambda fn, args: fn(args), run, tensors)
        self._waits_from_here(found)
        return found

    def _here(self, run: Callable[[Sequence[Any]], list]) -> Callable[[Sequence[Any]], list]:
        """In eager mode, makes `run` a graph, one for all calls with the same shapes: TensorFlow keeps a record of each
        collective forever, and these would accumulate if each call made a new one."""
        if not tf.executing_eagerly():
            return run
        if run.__name__ not in self._functions:
            self._functions[run.__name__] = tf.function(run, autograph=False)
        function = self._functions[run.__name__]
        # Hidden from gradient tapes, which would ask for its gradient: it has none, and every caller defines its own.
        return lambda tensors: function(tf.nest.map_structure(tf.stop_gradient, list(tensors), expand_composites=True))

    def _previous(self) -> list[tf.Operation]:
        """The operation in the graph being traced that an exchange must wait for, if there is one."""
        last = self._last
        return [last] if last is not None and not tf.executing_eagerly() and last.graph is _graph() else []

    def _waits_from_here(self, found: Sequence[Any]) -> None:
        """Makes later exchanges wait for these tensors as well."""
        if not tf.executing_eagerly():
            tensors = tf.nest.flatten(found, expand_composites=True)
            with tf.control_dependencies([*self._previous(), *tensors]), on_host():
                self._last = tf.no_op()

    def _sums_of_all(self, tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[Any]:
        found: list[Any] = list(tensors)
        summed = [place for place, tensor in enumerate(tensors) if _is_summed(tensor)]
        for place, total in zip(summed, self._sums([tensors[place] for place in summed]), strict=True):
            found[place] = total
        for place, tensor in enumerate(tensors):
            if isinstance(tensor, tf.IndexedSlices):
                values, numbers = map(_end_to_end, self._stacks([tensor.values, tensor.indices]))
                found[place] = tf.IndexedSlices(values, numbers, tensor.dense_shape)
            elif place not in summed:
                found[place] = tf.reduce_sum(self._stacks([tensor])[0], 0)
        return found

    def _sums(self, tensors: Sequence[Any]) -> list[tf.Tensor]:
        """Sums tensors in buckets. Every operation of a bucket depends only on that bucket's tensors."""
        sums: list[Any] = list(tensors)
        sizes = [tensor.shape.num_elements() * tensor.dtype.size for tensor in tensors]
        for members in in_buckets(sizes, self._pack_bytes, [tensor.dtype for tensor in tensors]):
            flat = joined([tensors[place] for place in members])
            parts = tf.split(self._group.all_reduce(flat), [tensors[place].shape.num_elements() for place in members])
            for place, part in zip(members, parts, strict=True):
                sums[place] = tf.reshape(part, tensors[place].shape)
        return sums

    def _stacks(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Gathers each tensor, of one static shape, from all workers: [workers, ...]."""
        wire = [on_wire(tensor) for tensor in tensors]
        found: list[Any] = list(tensors)
        for places in of_one_type(wire):
            rows = self._group.all_gather(joined([wire[place] for place in places])[tf.newaxis])
            parts = tf.split(rows, [wire[place].shape.num_elements() for place in places], axis=1)
            for place, part in zip(places, parts, strict=True):
                stack = tf.reshape(part, [self.size, *wire[place].shape])
                found[place] = off_wire(stack, tensors[place].dtype)
        return found

    # -- between steps ---------------------------------------------------------------------------------------------

    def end_call(self) -> None:
        """Returns when no worker waits for a part of a collective that this worker still has."""
        self.barrier()

    def leave(self) -> None:
        self._watch.stop()
        super().leave()

    def close(self) -> None:
        self._watch.stop()
        super().close()

    def reduction_s(self) -> tuple[float, float] | None:
        return None

    def collectives(self) -> dict[str, Collective]:
        return of_group(self._group)


def _graph() -> tf.Graph:
    return tf.compat.v1.get_default_graph()


def _is_summed(tensor: tf.Tensor | tf.IndexedSlices) -> bool:
    return tensor.dtype in _SUMMED and not isinstance(tensor, tf.IndexedSlices)


def _is_of_static_shape(tensor: tf.Tensor | tf.IndexedSlices) -> bool:
    return (tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor).shape.is_fully_defined()


def _end_to_end(stack: tf.Tensor) -> tf.Tensor:
    """[workers, n, ...] -> [workers * n, ...]"""
    return tf.reshape(stack, [-1, *stack.shape[2:]])
