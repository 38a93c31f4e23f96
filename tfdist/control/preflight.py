"""Before TensorFlow opens its port: is the port free, and are all peers there?

TensorFlow answers a busy port with a bare error code, and a missing peer by waiting in silence. Here each worker
listens on its own port and knocks at every other; a peer that is already further, with TensorFlow's server on the same
port, answers the knock just as well. When all have answered once, the port is handed over.
"""

from __future__ import annotations

import socket
import sys
import threading
import time

from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import StartupError, TfdistError

_KNOCK_SECONDS = 2.0  # for one attempt to connect
_PAUSE_SECONDS = 0.1  # between attempts
_REPORT_SECONDS = 15.0  # between lines that say who is missing


class Preflight:
    """Runs `wait_for_peers` in a thread while the body of the `with` runs (the import of TensorFlow), then joins it.

    Raises, at the end of the body, what `wait_for_peers` raised.
    """

    def __init__(self, cluster: Cluster, timeout: float):
        self._error: TfdistError | None = None
        self._body_done = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(cluster, timeout), name="tfdist-preflight", daemon=True)

    def _run(self, cluster: Cluster, timeout: float) -> None:
        try:
            # The port goes on answering during the body, for peers that have not knocked yet.
            wait_for_peers(cluster, timeout, self._body_done)
        except TfdistError as error:
            self._error = error

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind, *_) -> None:
        self._body_done.set()
        if kind is None:
            self._thread.join()
            if self._error:
                raise self._error


def wait_for_peers(cluster: Cluster, timeout: float, until: threading.Event | None = None) -> None:
    """Returns when every peer has answered at its address, and `until` (if given) is set.

    Raises: StartupError if this worker's port is in use, or if a peer is missing after `timeout` seconds.
    """
    if cluster.size < 2 or cluster.rank < 0:
        return
    with _listen(cluster):
        missing = set(range(cluster.size)) - {cluster.rank}
        start = reported = time.monotonic()
        while missing:
            for rank in sorted(missing):
                if _answers(cluster.peers[rank]):
                    missing.discard(rank)
            waited = time.monotonic() - start
            if missing and waited > timeout:
                raise StartupError(
                    f"{', '.join(cluster.name(rank) for rank in sorted(missing))} did not appear within {timeout:g} s: start it, check that its "
                    "address in TF_CONFIG can be reached from here, or raise --startup_timeout.")
            if missing and time.monotonic() - reported > _REPORT_SECONDS:
                reported = time.monotonic()
                print(f"tfdist: waiting for {', '.join(cluster.name(rank) for rank in sorted(missing))}, {waited:.0f} s of {timeout:g} s.", file=sys.stderr, flush=True)
            time.sleep(_PAUSE_SECONDS if missing else 0)
        if until:
            until.wait()


def _listen(cluster: Cluster) -> socket.socket:
    """A socket that answers knocks at this worker's port, on all interfaces."""
    port = int(cluster.address.rpartition(":")[2])
    in_use = StartupError(
        f"Port {port} of {cluster.name(cluster.rank)} is in use on this machine: stop the process that listens there, or change the address in TF_CONFIG.")
    # A server that allows sharing would let us bind and then take some of our connections: so knock first.
    if _answers(f"127.0.0.1:{port}"):
        raise in_use
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # our closed connections must not keep TensorFlow out
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # the launcher holds the port for us
    try:
        listener.bind(("", port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise in_use from None
    return listener


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_SECONDS):
            return True
    except OSError:  # also: the name is not known yet
        return False
