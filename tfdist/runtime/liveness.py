"""Whether a neighbour in the ring still runs: each worker sends both neighbours a byte now and then.

A process that ends closes its connections, which its neighbours notice at once. One that is stopped (SIGSTOP), or whose
machine or network is gone, does not: its pulse stops.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time

from tfdist.runtime.ring_connections import RingConnections

_BEATS = 4  # in the time after which silence counts as death


class Heartbeat:
    """Sends and hears the pulse over a ring of its own.

    `patience`: seconds of silence after which a neighbour is dead.
    """

    def __init__(self, ring: RingConnections, patience: float):
        self._ring, self._patience = ring, patience
        self._ended = threading.Event()
        self._heard = dict.fromkeys(((ring.rank - 1) % ring.size, (ring.rank + 1) % ring.size), time.monotonic())
        threading.Thread(target=self._beat, name="tfdist-pulse", daemon=True).start()

    def is_alive(self, rank: int) -> bool:
        """Whether the neighbour `rank` has been heard lately."""
        return time.monotonic() - self._heard[rank] < self._patience

    def close(self) -> None:
        self._ended.set()

    def _beat(self) -> None:
        neighbours = {
            self._ring.left.fileno(): (self._ring.left, (self._ring.rank - 1) % self._ring.size),
            self._ring.right.fileno(): (self._ring.right, (self._ring.rank + 1) % self._ring.size),
        }
        poll = select.poll()
        for number in neighbours:
            poll.register(number, select.POLLIN)
        while not self._ended.wait(self._patience / _BEATS):
            for connection, _ in neighbours.values():
                with contextlib.suppress(OSError):
                    connection.send(b".")
            for number, _ in poll.poll(0):
                connection, rank = neighbours[number]
                with contextlib.suppress(OSError):
                    if connection.recv(4096):
                        self._heard[rank] = time.monotonic()
