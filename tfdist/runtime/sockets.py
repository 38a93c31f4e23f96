"""Synchronous data parallelism of plain processes over TCP, without tf.distribute.

For programs that have used TensorFlow before they ask for a runtime: tf.distribute's multi-worker strategy must be made
before anything else, while these sockets can be opened at any time, around a model that exists. Workers meet at the
chief's TF_CONFIG address (rendezvous.py) and then talk to their neighbours in three rings: one for gradients
(RingReducer), one for all else, one for the pulse. One replica per process, on its first device. Tensors of a GPU pass
through host memory.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError
from tfdist.control.terminal import printable
from tfdist.runtime import batch_norm, rendezvous
from tfdist.runtime.array_bytes import from_bytes, to_bytes
from tfdist.runtime.host import on_host
from tfdist.runtime.liveness import Heartbeat
from tfdist.runtime.one_device import OneDevice
from tfdist.runtime.operations import OUR_RING, Collective
from tfdist.runtime.own_gradient import with_gradient
from tfdist.runtime.reducer import RingReducer, suits
from tfdist.runtime.ring import Ring
from tfdist.runtime.ring_connections import Patience, RingConnections
from tfdist.runtime.ring_error import RingError, user_error


class Sockets(OneDevice):
    """See runtime/base.py.

    Beyond the protocol: `gather` for rows inside a tf.function, `agree_on` and `leave` for scripts that call
    tfdist.fit.
    """

    name = "sockets"

    @classmethod
    def create(cls, config: Config, cluster: Cluster) -> Sockets:
        if not cluster.peers:
            raise ConfigError(
                "--strategy=sockets is for several workers, but TF_CONFIG lists none: start them with tfdist.launch, or"
                " use --strategy=one_device."
            )
        if config.strategy.communication in ("ring", "nccl"):
            raise ConfigError(
                f"--strategy=sockets has its own communication, not --communication={config.strategy.communication}:"
                " use --communication=auto or --strategy=multi_worker."
            )
        return cls(config, cluster)

    def __init__(self, config: Config, cluster: Cluster):
        self.cluster, self.rank, self.size = cluster, cluster.rank, cluster.size
        self.replicas, self.first_replica = cluster.size, cluster.rank
        self._lock = threading.Lock()
        self._last: dict[str, tf.Operation] = {}
        startup, silence = config.cluster.startup_timeout, config.cluster.heartbeat_timeout
        patience = Patience(config.strategy.collective_timeout, self._is_alive, silence)
        self._heartbeat: Heartbeat | None = None
        try:
            self._front = RingConnections(
                cluster, lambda endpoint: rendezvous.exchange(cluster, endpoint, startup), patience
            )

            def exchange(endpoint: str) -> list[str]:
                return [bytes(other).decode() for other in self._front.all_gather(endpoint.encode(), "endpoint")]

            self._heartbeat = Heartbeat(RingConnections(cluster, exchange, Patience()), silence)
            self._gradients = Ring(cluster, exchange, patience, share=config.strategy.communication == "auto")
        except RingError as error:
            raise user_error(str(error)) from error
        self._reducer = RingReducer(self._gradients, int(config.strategy.pack_mb * 2**20))
        batch_norm.synchronize_with(self)

    def _is_alive(self, rank: int) -> bool:
        return self._heartbeat is None or self._heartbeat.is_alive(rank)

    # -- inside a tf.function --------------------------------------------------------------------------------------

    def scope(self) -> AbstractContextManager:
        def create(next_creator, **kwargs):
            variable = next_creator(**kwargs)
            with tf.init_scope():
                variable.assign(self.broadcast([variable.numpy()])[0])
            return variable

        return tf.variable_creator_scope(create)

    def replica_id(self) -> tf.Tensor:
        return tf.constant(self.rank)

    def all_reduce(self, tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[Any]:
        suited = [index for index, tensor in enumerate(tensors) if suits(tensor)]
        others = [index for index in range(len(tensors)) if index not in set(suited)]
        reduced = dict(zip(suited, self._reducer([tensors[index] for index in suited]) if suited else [], strict=True))
        if others:
            rows = self.gather([tf.convert_to_tensor(tensors[index])[tf.newaxis] for index in others])
            reduced |= {index: tf.reduce_sum(stack, axis=0) for index, stack in zip(others, rows, strict=True)}
        return [reduced[index] for index in range(len(tensors))]

    def gather_row(self, row: tf.Tensor) -> tf.Tensor:
        return with_gradient(lambda row: self.gather([row[tf.newaxis]])[0], self._own_row_of_sum, row)

    def _own_row_of_sum(self, rows: tf.Tensor) -> tf.Tensor:
        """The adjoint of gather_row, which is this one's: [workers, k] of each worker -> [k]."""

        return with_gradient(
            lambda rows: tf.reduce_sum(self.gather([rows[tf.newaxis]])[0], 0)[self.rank], self.gather_row, rows
        )

    def gather(
        self, tensors: Sequence[tf.Tensor], same: Sequence[tf.Tensor] = (), stamp: Callable[[], int] = lambda: 0
    ) -> list[tf.Tensor]:
        """The rows of every worker, bit for bit: [n_r, ...] on worker r -> [sum of n_r, ...], of any numeric type.

        Without a gradient. All gathers of one graph run in the order in which they were traced, the same everywhere.
        same: tensors that must be equal on all workers; if their checksums are not, that is an error.
        stamp: gives, each time that the gather runs, a number that must be the same on all workers as well.
        """
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        with tf.control_dependencies(self._previous()), on_host():
            rows = tf.numpy_function(
                functools.partial(self._exchange_rows, len(tensors), stamp),
                [*tensors, *same],
                [tensor.dtype for tensor in tensors],
            )
        rows = rows if isinstance(rows, (list, tuple)) else [rows]
        if not tf.executing_eagerly():
            self._last = {"op": rows[0].op}
        for row, tensor in zip(rows, tensors, strict=True):
            row.set_shape([None, *tensor.shape[1:]])
        return list(rows)

    def _previous(self) -> list[tf.Operation]:
        """The gather before, if it is of the graph that is being traced."""
        if tf.executing_eagerly():
            return []
        return [op for op in self._last.values() if op.graph is tf.compat.v1.get_default_graph()]

    def _exchange_rows(self, count: int, stamp_of: Callable[[], int], *arrays: np.ndarray) -> list[np.ndarray]:
        arrays, same = arrays[:count], arrays[count:]
        stamp = stamp_of()
        for array in same:
            data: Any = np.ascontiguousarray(array)
            if array.dtype == object:
                data = repr(array.tolist()).encode()
            stamp = zlib.crc32(data, stamp)
        lengths = np.array([len(array) for array in arrays], np.int64)
        with self._lock:
            blocks = self._front.all_gather(
                b"".join([lengths.tobytes(), *(array.tobytes() for array in arrays)]), "batches", stamp
            )
        parts: list[list[np.ndarray]] = [[] for _ in arrays]
        for block in blocks:
            offset = lengths.nbytes
            for part, array, length in zip(parts, arrays, np.frombuffer(block, np.int64, len(arrays)), strict=True):
                shape = (int(length), *array.shape[1:])
                part.append(np.frombuffer(block, array.dtype, math.prod(shape), offset).reshape(shape))
                offset += part[-1].nbytes
        return [np.concatenate(part) for part in parts]

    # -- between steps ---------------------------------------------------------------------------------------------

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        array = np.asarray(array)
        blocks = self._host_gather(array.tobytes(), "all_gather")
        return np.stack([np.frombuffer(block, array.dtype, array.size).reshape(array.shape) for block in blocks])

    def broadcast(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        data = to_bytes(arrays) if self.rank == 0 else b""
        return from_bytes(self._host_gather(data, "broadcast")[0], arrays)

    def _broadcast_bytes(self, data: bytes, name: str) -> bytes | bytearray:
        return self._host_gather(data, name)[0]

    def barrier(self) -> None:
        self._host_gather(b"", "barrier")

    def agree_on(self, call: str) -> None:
        """Raises ConfigError if not all workers are about to do the same; otherwise returns when all are."""
        for rank, other in enumerate(self._host_gather(call.encode(), "call")):
            if bytes(other) != call.encode():
                raise ConfigError(
                    f"Rank {self.rank} is at {call}, rank {rank} at {printable(bytes(other).decode(errors='replace'))}:"
                    " all workers must make the same calls of tfdist, with the same arguments, in the same order."
                )

    def collectives(self) -> dict[str, Collective]:
        return {
            "all_reduce": Collective(OUR_RING, lambda x: self.all_reduce([x])[0]),
            "all_gather": Collective(OUR_RING, lambda x: self.gather([x])[0]),
            "broadcast": Collective(OUR_RING, on_host=lambda array: self.broadcast([array])[0]),
        }

    def leave(self) -> None:
        """Tells the neighbour that this script has come to its end, in case it waits for this worker."""
        self._front.say_goodbye()

    def waiting_for(self) -> int | None:
        rings = (self._gradients, self._front)
        return next((ring.waiting_for for ring in rings if ring.waiting_for is not None), None)

    def reduction_s(self) -> tuple[float, float] | None:
        return self._reducer.travel_s, self._reducer.wait_s

    def close(self) -> None:
        self.barrier()  # nobody closes a connection on which another still waits
        if self._heartbeat:
            self._heartbeat.close()

    def _host_gather(self, data: bytes, name: str) -> list[bytes | bytearray]:
        try:
            with self._lock:
                return self._front.all_gather(data, name)
        except RingError as error:
            raise user_error(str(error)) from error


def warn_about_gpus(runtime: Sockets) -> None:
    """Says that a worker uses one GPU only."""
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) > 1 and runtime.rank == 0:
        print(
            f"tfdist: each worker computes on one GPU, but sees {len(gpus)}: start one worker per GPU (tfdist.launch"
            " divides them).",
            file=sys.stderr,
        )
