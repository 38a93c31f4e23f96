"""Lets plain processes find each other: at the chief's TF_CONFIG address, over TCP, by control/wire.py.

A worker connects to the chief and says who it is and where its ring listens; once all have connected, the chief answers
each with the endpoints of all, as JSON. Silent connections are probes of control/preflight.py, and are dropped.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import time
from typing import Any

from tfdist.control import wire
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ClusterError, StartupError
from tfdist.control.packet_filter import bind_address
from tfdist.control.preflight import bind_shared
from tfdist.control.reception import Reception
from tfdist.control.terminal import printable

_PATIENCE = 5.0  # seconds for an attempt to be accepted, and for an answer to be sent
_PAUSE = 0.1  # seconds between attempts


def exchange(cluster: Cluster, endpoint: str, timeout: float) -> list[str]:
    """Returns the endpoint of every worker in rank order, once all have called this.

    Raises: StartupError if a worker does not appear within `timeout` seconds or this worker's port is taken;
    ClusterError if the workers' TF_CONFIGs list different addresses, or their job tokens differ.
    """
    # Meanwhile every worker answers at its own port, for peers that still probe it.
    with _listen(cluster) as listener:
        if cluster.is_chief:
            return _collect(cluster, listener, endpoint, timeout)
        return _report(cluster, endpoint, timeout)


def _listen(cluster: Cluster) -> socket.socket:
    port = cluster.address.rpartition(":")[2]
    try:
        listener = bind_shared(int(port), bind_address(cluster.address, cluster.peers))
        listener.listen(4096)
    except OSError as error:
        reason = (
            "is in use on this machine" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror})"
        )
        raise StartupError(
            f"Port {port} of {cluster.name(cluster.rank)} {reason}: stop the process that listens on it, or change the"
            " address in TF_CONFIG."
        ) from None
    return listener


def _collect(cluster: Cluster, listener: socket.socket, endpoint: str, timeout: float) -> list[str]:
    """The chief's part: collects the endpoints of all workers, and sends all of them to each."""
    deadline = time.monotonic() + timeout
    endpoints, connections = {0: endpoint}, {}
    with contextlib.ExitStack() as stack:
        reception = stack.enter_context(
            Reception(
                listener, wire.SharedKey.of(cluster.secret, "rendezvous"), 0, lambda rank: 0 < rank < cluster.size
            )
        )
        while len(endpoints) < cluster.size:
            if time.monotonic() > deadline:
                names = ", ".join(cluster.name(rank) for rank in range(cluster.size) if rank not in endpoints)
                raise StartupError(
                    " ".join(
                        [
                            (
                                f"{names} did not appear within {timeout:g} s: start all workers, check that"
                                f" {cluster.address} can be reached from each, or raise --startup_timeout."
                            ),
                            *(f"Rejected: {note}" for note in reception.notes),
                        ]
                    )
                )
            for arrival in reception.poll(_PAUSE):
                connection = stack.enter_context(arrival.connection)
                connection.settimeout(_PATIENCE)
                hello = _parse_hello(arrival.message)
                if hello is None:
                    continue
                if arrival.rank in connections:  # a worker that merely retries no longer listens on its old connection
                    _answer(
                        {arrival.rank: connections[arrival.rank]},
                        {
                            "error": (
                                f"Another process claims to be rank {arrival.rank}, too: give each worker its own"
                                " task.index in TF_CONFIG."
                            )
                        },
                    )
                peers, endpoints[arrival.rank] = hello
                connections[arrival.rank] = connection
                if peers != list(cluster.peers):
                    problem = (
                        f"TF_CONFIG of rank {arrival.rank} lists {printable(', '.join(peers))}, but the one of the"
                        f" chief lists {', '.join(cluster.peers)}: give all workers the same cluster."
                    )
                    _answer(connections, {"error": problem})
                    raise ClusterError(problem)
        table = [endpoints[rank] for rank in range(cluster.size)]
        _answer(connections, {"endpoints": table})
    return table


def _parse_hello(message: bytes) -> tuple[list[str], str] | None:
    """Returns (the addresses in a worker's TF_CONFIG, its endpoint), or None for any other message."""
    with contextlib.suppress(ValueError):
        hello = wire.parse_object(message)
        peers, endpoint = hello.get("peers"), hello.get("endpoint")
        if isinstance(peers, list) and _is_texts(peers) and isinstance(endpoint, str):
            return peers, endpoint
    return None


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _report(cluster: Cluster, endpoint: str, timeout: float) -> list[str]:
    """Sends this worker's endpoint to the chief, and receives the endpoints of all."""
    deadline = time.monotonic() + timeout
    key = wire.SharedKey.of(cluster.secret, "rendezvous")
    hello = json.dumps({"peers": list(cluster.peers), "endpoint": endpoint}).encode()
    while time.monotonic() < deadline:
        try:
            with wire.connect(
                cluster.peers[0], key, cluster.rank, 0, min(time.monotonic() + _PATIENCE, deadline), hello
            ) as connection:
                answer = wire.read_message(connection, deadline)
            if "error" in answer:
                raise ClusterError(printable(str(answer["error"])))
            if _is_texts(answer.get("endpoints")) and len(answer["endpoints"]) == cluster.size:
                return answer["endpoints"]
        except wire.OtherJobError as mismatch:
            raise ClusterError(f"The chief, {cluster.name(0)}, {mismatch}") from None
        except ClusterError:
            raise
        except (OSError, ValueError):  # nobody answers there yet, or it is a stranger
            pass
        time.sleep(_PAUSE)
    raise StartupError(
        f"The chief, {cluster.name(0)}, did not answer within {timeout:g} s: start all workers, check that its address"
        " can be reached from here, or raise --startup_timeout."
    )


def _answer(connections: dict[int, socket.socket], message: dict) -> None:
    for connection in connections.values():
        with contextlib.suppress(OSError):
            wire.send_message(connection, message)
