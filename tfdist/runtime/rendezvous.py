"""How plain processes find each other: at the chief's TF_CONFIG address, over TCP, one line of JSON each way.

A worker connects to the chief and says who it is and where its ring listens; when all have, the chief answers each with
the endpoints of all. Connections that say nothing are the knocks of control/preflight.py, and are dropped.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import time

from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ClusterError, StartupError
from tfdist.control.preflight import bind_everywhere

_PATIENCE = 5.0  # seconds for a line that has begun
_PAUSE = 0.1  # seconds between attempts


def exchange(cluster: Cluster, endpoint: str, timeout: float) -> list[str]:
    """The endpoint of every worker in rank order, once all have called this.

    Raises: StartupError if someone does not appear within `timeout` seconds or this worker's port is taken;
    ClusterError if the workers' TF_CONFIGs list different addresses.
    """
    # Every worker answers at its own port meanwhile, for peers that still knock there.
    with _listen(cluster) as listener:
        if cluster.is_chief:
            return _collect(cluster, listener, endpoint, timeout)
        return _report(cluster, endpoint, timeout)


def _listen(cluster: Cluster) -> socket.socket:
    port = cluster.address.rpartition(":")[2]
    try:
        listener = bind_everywhere(int(port))
        listener.listen(4096)
    except OSError as error:
        reason = "is in use on this machine" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror})"
        raise StartupError(f"Port {port} of {cluster.name(cluster.rank)} {reason}: stop the process that listens there, or change the address in TF_CONFIG.") from None
    return listener


def _collect(cluster: Cluster, listener: socket.socket, endpoint: str, timeout: float) -> list[str]:
    """The chief's part."""
    deadline = time.monotonic() + timeout
    listener.settimeout(_PAUSE)
    endpoints, connections = {0: endpoint}, {}
    with contextlib.ExitStack() as stack:
        while len(endpoints) < cluster.size:
            if time.monotonic() > deadline:
                names = ", ".join(cluster.name(rank) for rank in range(cluster.size) if rank not in endpoints)
                raise StartupError(f"{names} did not appear within {timeout:g} s: start all workers, check that {cluster.address} can be reached from each, or raise --startup_timeout.")
            try:
                connection = stack.enter_context(listener.accept()[0])
                connection.settimeout(_PATIENCE)
                hello = json.loads(_read_line(connection))
                rank, peers, theirs = hello["rank"], hello["peers"], hello["endpoint"]
            except (OSError, ValueError, KeyError):
                continue
            endpoints[rank], connections[rank] = theirs, connection
            if peers != list(cluster.peers):
                problem = f"TF_CONFIG of rank {rank} lists {', '.join(peers)}, that of the chief {', '.join(cluster.peers)}: give all workers the same cluster."
                _answer(connections, {"error": problem})
                raise ClusterError(problem)
        table = [endpoints[rank] for rank in range(cluster.size)]
        _answer(connections, {"endpoints": table})
    return table


def _report(cluster: Cluster, endpoint: str, timeout: float) -> list[str]:
    """The part of the others."""
    deadline = time.monotonic() + timeout
    host, _, port = cluster.peers[0].rpartition(":")
    hello = json.dumps({"rank": cluster.rank, "peers": list(cluster.peers), "endpoint": endpoint}).encode() + b"\n"
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError), socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE) as connection:
            connection.sendall(hello)
            connection.settimeout(max(deadline - time.monotonic(), _PAUSE))
            answer = json.loads(_read_line(connection))
            if "error" in answer:
                break
            return answer["endpoints"]
        time.sleep(_PAUSE)
    else:
        raise StartupError(f"The chief, {cluster.name(0)}, did not answer within {timeout:g} s: start all workers, check that its address can be reached from here, or raise --startup_timeout.")
    raise ClusterError(answer["error"])


def _answer(connections: dict[int, socket.socket], message: dict) -> None:
    for connection in connections.values():
        with contextlib.suppress(OSError):
            connection.sendall(json.dumps(message).encode() + b"\n")


def _read_line(connection: socket.socket) -> bytes:
    """A line that ends in a newline; ValueError if the connection ends before it does."""
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(65536)
        if not part:
            raise ValueError("closed")
        line += part
    return line
