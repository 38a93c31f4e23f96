"""Makes a worker's connections to others of the ring, each with proof of the job's secret."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tfdist.control import wire
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ClusterError
from tfdist.control.reception import Reception
from tfdist.runtime.ring.ring_error import MARK, RingError

_MEETING_SECONDS, _ATTEMPT_SECONDS = 60.0, 20.0


def meet(
    cluster: Cluster, listener: socket.socket, endpoints: Sequence[str], distances: Sequence[int]
) -> tuple[dict[int, socket.socket], dict[int, socket.socket]]:
    """distance -> connection: to the ranks at these distances to the right, and from those to the left.

    Both are made at the same time, since each side waits for the other's proof. Raises ClusterError, RingError.
    """
    key = wire.SharedKey.of(cluster.secret, "ring", *endpoints)
    rights = {distance: (cluster.rank + distance) % cluster.size for distance in distances}
    lefts = {distance: (cluster.rank - distance) % cluster.size for distance in distances}
    deadline, given_up = time.monotonic() + _MEETING_SECONDS, threading.Event()
    connected: dict[int, socket.socket] = {}
    with ThreadPoolExecutor(1, "tfdist-ring-accept") as pool:
        accepting = pool.submit(
            _accept,
            listener,
            key,
            cluster.rank,
            set(lefts.values()),
            lambda: time.monotonic() > deadline or given_up.is_set(),
        )
        try:
            for distance, rank in rights.items():
                try:
                    connected[distance] = _connect(endpoints[rank], key, cluster.rank, rank, deadline)
                except wire.OtherJobError as mismatch:
                    raise ClusterError(f"{cluster.name(rank)} {mismatch}") from None
            accepted = accepting.result()
        except BaseException:
            given_up.set()
            for connection in connected.values():
                connection.close()
            raise
    return connected, {distance: accepted[rank] for distance, rank in lefts.items()}


def _connect(endpoint: str, key: wire.SharedKey, rank: int, expected: int, deadline: float) -> socket.socket:
    while True:
        try:
            return wire.connect(endpoint, key, rank, expected, min(deadline, time.monotonic() + _ATTEMPT_SECONDS))
        except OSError as error:
            if time.monotonic() > deadline:
                raise RingError(
                    f"{MARK}{endpoint.partition('/')[0]} cannot be reached ({error}): open the ephemeral ports between"
                    " workers, or use --communication=ring."
                ) from None
            time.sleep(0.05)


def _accept(
    listener: socket.socket, key: wire.SharedKey, rank: int, expected: set[int], is_over: Callable[[], bool]
) -> dict[int, socket.socket]:
    """rank -> its connection; the last one of a rank that tries again."""
    found: dict[int, socket.socket] = {}
    with Reception(listener, key, rank, lambda other: other in expected) as reception:
        while len(found) < len(expected):
            for arrival in reception.poll(0.1):
                if earlier := found.pop(arrival.rank, None):
                    earlier.close()
                found[arrival.rank] = arrival.connection
            if is_over() and len(found) < len(expected):
                break
        else:
            return found
    for connection in found.values():
        connection.close()
    notes = "".join(f" Rejected: {note}" for note in reception.notes)
    raise RingError(
        f"{MARK}rank {min(expected - found.keys())} did not connect within {_MEETING_SECONDS:g} s: open the ephemeral"
        f" ports between workers, or use --communication=ring.{notes}"
    )
