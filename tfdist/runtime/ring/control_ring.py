"""Messages between workers other than tensors, over authenticated connections, and whether the neighbors are alive.

Workers meet at the chief's TF_CONFIG address (rendezvous.py). One ring carries the gathered messages, another the
heartbeats (heartbeat.py).
"""

from __future__ import annotations

import select
import socket
import threading
import zlib
from collections.abc import Sequence

import numpy as np

from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.runtime.array_bytes import to_bytes
from tfdist.runtime.ring import rendezvous
from tfdist.runtime.ring.heartbeat import Heartbeat
from tfdist.runtime.ring.ring_connections import Patience, RingConnections
from tfdist.runtime.ring.ring_error import MARK, RingError, held_differently, unanswered, user_error
from tfdist.runtime.rounding import are_same


class ControlRing:
    """The control ring of one worker; all workers construct it together.

    Attributes: patience, how long to wait for a silent neighbor, also in further rings.
    Raises: the errors of rendezvous.exchange, and PeerLostError.
    """

    def __init__(self, config: Config, cluster: Cluster):
        startup, silence = config.cluster.startup_timeout, config.cluster.heartbeat_timeout
        self._lock = threading.Lock()
        self._heartbeat: Heartbeat | None = None
        self.patience = Patience(config.strategy.collective_timeout, self.is_alive, silence)
        try:
            self._ring = RingConnections(
                cluster, lambda endpoint: rendezvous.exchange(cluster, endpoint, startup), self.patience
            )
            self._heartbeat = Heartbeat(RingConnections(cluster, self.exchange, Patience()), silence)
        except RingError as error:
            raise user_error(str(error)) from error

    def is_alive(self, rank: int) -> bool:
        """Whether a neighbor has been heard from lately."""
        return self._heartbeat is None or self._heartbeat.is_alive(rank)

    def exchange(self, endpoint: str) -> list[str]:
        """Gathers an endpoint from every worker, in rank order: the addresses to which further rings connect."""
        return [bytes(other).decode() for other in self._ring.all_gather(endpoint.encode(), "endpoint")]

    def gather(self, data: bytes, name: str, stamp: int = 0) -> Sequence[bytes | memoryview]:
        """Gathers bytes from all ranks, see RingConnections.all_gather. Raises RingError."""
        with self._lock:
            return self._ring.all_gather(data, name, stamp)

    def gather_batches(self, arrays: Sequence[np.ndarray], stamp: int, same: Sequence[np.ndarray]) -> list[memoryview]:
        """Returns the bytes of all workers' arrays, in rank order. Raises RingError if a worker has another stamp, or
        other numbers in `same`: floating-point numbers may differ by what the order of a sum changes (rounding.py).
        """
        content = [array if array.dtype != object else _as_bytes(array) for array in same]
        stamps = np.array([zlib.crc32(to_bytes(content))], np.uint64)
        blocks = [memoryview(block) for block in self.gather(to_bytes([stamps, *arrays]), "batches", stamp)]
        # All workers see the same stamps here, and so make the second gather together.
        if any(block[: stamps.nbytes] != blocks[0][: stamps.nbytes] for block in blocks):
            for rank, theirs in enumerate(self.gather(to_bytes(content), "batches")):
                if not are_same(content, theirs):
                    raise held_differently(self._ring.rank, rank, "batches")
        return [block[stamps.nbytes :] for block in blocks]

    def gather_for_user(self, data: bytes, name: str) -> Sequence[bytes | memoryview]:
        """Gathers between steps; raises a user error at once, as no later code turns a RingError into one."""
        try:
            return self.gather(data, name)
        except RingError as error:
            raise user_error(str(error)) from error

    @property
    def waiting_for(self) -> int | None:
        """The neighbor whose bytes this worker waits for at the moment."""
        return self._ring.waiting_for

    def lost(self) -> str | None:
        """Why a neighbor is gone, as the text of a RingError; None if none is. May be called from any thread."""
        ring = self._ring
        if ring.has_left():
            return ring.farewell_of_left()
        for connection, rank in ((ring.left, (ring.rank - 1) % ring.size), (ring.right, (ring.rank + 1) % ring.size)):
            if _is_closed(connection):
                return f"{MARK}lost contact with rank {rank} (it closed the connection)."
            if not self.is_alive(rank):
                return unanswered(rank)
        return None

    def say_goodbye(self) -> None:
        """Says goodbye to the neighbors, see RingConnections."""
        self._ring.say_goodbye()

    def close(self) -> None:
        """Stops the heartbeats."""
        if self._heartbeat:
            self._heartbeat.close()


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed the connection, even if some data that it sent is still unread."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))


def _as_bytes(texts: np.ndarray) -> np.ndarray:
    return np.frombuffer(repr(texts.tolist()).encode(), np.uint8)
