"""The common part of all runtimes of plain processes, however their tensors travel: see PeerRuntime in base.py.

They need no tf.distribute. Everything except the tensors of a step goes over a ring of connections (control_ring.py),
which works whether or not TensorFlow has been used before. One replica per process, on its first device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError
from tfdist.control.terminal import printable, say
from tfdist.runtime import batch_norm
from tfdist.runtime.array_bytes import from_bytes, to_bytes
from tfdist.runtime.first_values import chiefs_first_values
from tfdist.runtime.host import first_gpu
from tfdist.runtime.own_gradient import with_gradient
from tfdist.runtime.ring.control_ring import ControlRing
from tfdist.runtime.single_replica import SingleReplica

ALIKE = "all workers must make the same calls"


class Peers(SingleReplica):
    """A base class. Each runtime implements the rest of the protocol, the operations on tensors, itself."""

    name = "sockets"

    def __init__(self, cluster: Cluster, control: ControlRing):
        self.cluster, self.rank, self.size = cluster, cluster.rank, cluster.size
        self.replicas, self.first_replica = cluster.size, cluster.rank
        self._control = control
        batch_norm.synchronize_with(self)

    # -- inside a tf.function --------------------------------------------------------------------------------------

    def scope(self) -> AbstractContextManager:
        return chiefs_first_values(self)

    def batch_devices(self) -> Sequence[str]:
        return first_gpu()

    def all_reduce(self, tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[Any]:
        raise NotImplementedError

    def gather_row(self, row: tf.Tensor) -> tf.Tensor:
        return with_gradient(self.stacked, self._own_row_of_sum, row)

    def _own_row_of_sum(self, rows: tf.Tensor) -> tf.Tensor:
        """The gradient of gather_row; its gradient is gather_row again. [workers, k] on each worker -> [k]."""
        return with_gradient(lambda rows: tf.reduce_sum(self.stacked(rows), 0)[self.rank], self.gather_row, rows)

    def gather(
        self, tensors: Sequence[tf.Tensor], same: Sequence[tf.Tensor] = (), stamp: Callable[[], int] = lambda: 0
    ) -> list[tf.Tensor]:
        raise NotImplementedError

    def stacked(self, tensor: tf.Tensor) -> tf.Tensor:
        """[workers, *tensor.shape]: the tensors of all workers, of one shape, bit for bit; without a gradient."""
        raise NotImplementedError

    # -- between steps ---------------------------------------------------------------------------------------------

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        array = np.asarray(array)
        blocks = self._gathered(array.tobytes(), "all_gather")
        return np.stack([np.frombuffer(block, array.dtype, array.size).reshape(array.shape) for block in blocks])

    def broadcast(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        data = to_bytes(arrays) if self.rank == 0 else b""
        return from_bytes(self._gathered(data, "broadcast")[0], arrays)

    def _broadcast_bytes(self, data: bytes, name: str) -> bytes | memoryview:
        return self._gathered(data, name)[0]

    def barrier(self) -> None:
        self._gathered(b"", "barrier")

    def agree_on(self, call: str) -> None:
        """Returns when all workers are about to make the same call. Raises ConfigError if their calls differ."""
        for rank, other in enumerate(self._gathered(call.encode(), "tfdist call")):
            if bytes(other) != call.encode():
                raise ConfigError(
                    f"Rank {self.rank} is at {call}, rank {rank} at {printable(bytes(other).decode(errors='replace'))}:"
                    f" {ALIKE} of tfdist, with the same arguments, in the same order."
                )

    def _gathered(self, data: bytes, name: str) -> Sequence[bytes | memoryview]:
        try:
            return self._control.gather_for_user(data, name)
        except ConfigError as error:  # another worker is elsewhere in the program
            if ALIKE in str(error):
                raise
            raise ConfigError(
                f"{error} {ALIKE[0].upper()}{ALIKE[1:]}, including evaluate and predict in a callback, not only"
                " the chief."
            ) from None

    def end_call(self) -> None:
        """Does nothing: a worker that continues takes nothing away from a worker that is not done yet."""

    def leave(self) -> None:
        """Tells the neighbor that this script has ended, in case the neighbor waits for this worker."""
        self._control.say_goodbye()

    def waiting_for(self) -> int | None:
        return self._control.waiting_for

    def close(self) -> None:
        self.barrier()  # nobody closes a connection on which another worker still waits
        self._control.close()


def warn_about_gpus(rank: int) -> None:
    """Tells the user, on rank 0, if a worker sees several GPUs: it uses only one."""
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) > 1 and rank == 0:
        say(
            f"each worker computes on one GPU, but sees {len(gpus)}: start one worker per GPU, with `tfdist"
            f" launch --workers={len(gpus)}`, which divides them."
        )
