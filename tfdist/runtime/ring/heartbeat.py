"""Heartbeats: a worker regularly sends a byte to each peer that it is connected to, and notices silent peers.

A process that ends closes its connections, which its peers notice at once. A process that is stopped (SIGSTOP), or
whose machine or network is gone, does not: its heartbeats stop.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time

from tfdist.runtime.ring.ring_connections import RingConnections

_BEATS = 4  # heartbeats within `patience`


class Heartbeat:
    """Sends and receives heartbeats over a ring of its own.

    `patience`: seconds of silence after which a rank counts as lost.
    """

    def __init__(self, ring: RingConnections, patience: float):
        self._patience = patience
        self._ended = threading.Event()
        self._connections = [
            (connection, (ring.rank + sign * distance) % ring.size)
            for sign, connections in ((1, ring.rights), (-1, ring.lefts))
            for distance, connection in connections.items()
        ]
        self._looked = time.monotonic()
        self._heard = {rank: self._looked for _, rank in self._connections}
        threading.Thread(target=self._beat, name="tfdist-heartbeat", daemon=True).start()

    def is_alive(self, rank: int) -> bool:
        """Whether a rank to which there is a connection has been heard from lately."""
        now = time.monotonic()
        if now - self._looked > self._patience / 2 and not self._ended.is_set():
            return True  # this process itself was stopped, and has heard from nobody since
        return now - self._heard[rank] < self._patience

    def close(self) -> None:
        self._ended.set()

    def _beat(self) -> None:
        by_number = {connection.fileno(): (connection, rank) for connection, rank in self._connections}
        poll = select.poll()
        for number in by_number:
            poll.register(number, select.POLLIN)
        while not self._ended.wait(self._patience / _BEATS):
            now = time.monotonic()
            if now - self._looked > self._patience / 2:  # stopped, perhaps with all others: silence counts from now
                self._heard = dict.fromkeys(self._heard, now)
            self._looked = now
            for connection, _ in self._connections:
                with contextlib.suppress(OSError):
                    connection.send(b".")
            for number, _ in poll.poll(0):
                connection, rank = by_number[number]
                with contextlib.suppress(OSError):
                    if connection.recv(4096):
                        self._heard[rank] = time.monotonic()
