"""Checks before TensorFlow opens its port: is the port free, and are all peers there?

For a busy port TensorFlow gives only an error code, and for a missing peer it waits silently. Here each worker listens
on its own port and probes all others; a peer that is already further along, with TensorFlow's server on the same port,
answers the probe just as well. When all have answered once, the port is freed for TensorFlow. A launcher reserves the
ports of its workers (PortReservation) before it starts them.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import StartupError, TfdistError
from tfdist.control.terminal import say

_PROBE_SECONDS = 2.0  # for one attempt to connect
_PAUSE_SECONDS = 0.1  # between attempts
_REPORT_SECONDS = 10.0  # between lines that say who is missing
_PROBES_AT_ONCE = 32
_PROBES_ACCEPTED_AT_ONCE = 4096
# How long the port keeps answering after all peers have answered, for peers that have not probed it yet: later, nothing
# may be listening there. Peers that are further along (see above) do not probe.
_LINGER_SECONDS = 3.0


class PortReservation:
    """Reserves TCP ports while the job runs: sockets bound with SO_REUSEPORT, but not listening.

    No other program can take the ports, but the workers can listen on them: TensorFlow's gRPC server sets SO_REUSEPORT
    if TF_GRPC_REUSE_PORT is "true" (without it, the server does not start beside the reservation). If a free port were
    chosen and released, another process could take it before the worker does.
    """

    def __init__(self, count: int, host: str = "127.0.0.1"):
        self._sockets: list[socket.socket] = []
        try:
            for _ in range(count):
                self._sockets.append(bind_everywhere(0))
        except OSError:
            self.close()
            raise
        self.addresses = [f"{host}:{reserved.getsockname()[1]}" for reserved in self._sockets]

    def close(self) -> None:
        for reserved in self._sockets:
            reserved.close()


class Preflight:
    """Context manager: runs `wait_for_peers` in a thread while the body runs (the import of TensorFlow), then joins it.

    Raises the error of `wait_for_peers`, if any, at the end of the body. An error of the body takes precedence.
    """

    def __init__(self, cluster: Cluster, timeout: float):
        self.began = time.monotonic()  # --startup_timeout counts from here
        self._error: TfdistError | None = None
        self._body_done = threading.Event()
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(cluster, timeout), name="tfdist-preflight", daemon=True)

    def _run(self, cluster: Cluster, timeout: float) -> None:
        try:
            # The port keeps answering during the body, for peers that have not probed it yet.
            wait_for_peers(cluster, timeout, until=self._body_done, given_up=self._given_up)
        except TfdistError as error:
            self._error = error

    def __enter__(self) -> Preflight:
        self._thread.start()
        return self

    def __exit__(self, kind, *_) -> None:
        self._body_done.set()
        if kind is not None:
            self._given_up.set()
            return
        self._thread.join()
        if self._error:
            raise self._error


def wait_for_peers(
    cluster: Cluster,
    timeout: float,
    *,
    until: threading.Event | None = None,
    given_up: threading.Event | None = None,
    report: Callable[[str], None] = say,
) -> None:
    """Returns when every peer has answered at its address and `until` (if given) is set; early if `given_up` is set.

    Args:
      cluster: gives the peers; none if this process is alone or an evaluator, or if no addresses are known.
      timeout: seconds in which the peers must appear.
      report: called about every ten seconds with a line that says who is missing.
    Raises: StartupError if this worker's port is in use, or if a peer is missing after `timeout` seconds.
    """
    if cluster.size < 2 or cluster.rank < 0 or not cluster.peers:
        return
    missing = [rank for rank in range(cluster.size) if rank != cluster.rank]
    start = reported = complete = time.monotonic()
    unseen = len(missing)  # number of peers that have not probed this worker yet
    with _listen(cluster) as listener, ThreadPoolExecutor(_PROBES_AT_ONCE, "tfdist-probe") as probes:
        while (
            missing or (until and not until.is_set()) or (unseen > 0 and time.monotonic() < complete + _LINGER_SECONDS)
        ):
            # In parallel: an address that drops packets must not delay the others.
            found = probes.map(answers, [cluster.peers[rank] for rank in missing])
            missing = [rank for rank, answered in zip(missing, found, strict=True) if not answered]
            unseen -= _accept_probes(listener)
            now = time.monotonic()
            complete = now if missing else complete
            if given_up and given_up.is_set():
                return
            names = ", ".join(cluster.name(rank) for rank in missing)
            if missing and now - start > timeout:
                raise did_not_appear(names, len(missing), timeout)
            if missing and now - reported > _REPORT_SECONDS:
                reported = now
                report(f"waiting for {names}, {now - start:.0f} s of {timeout:g} s.")
            if missing or until or unseen > 0:
                time.sleep(_PAUSE_SECONDS)


def did_not_appear(names: str, count: int, timeout: float) -> StartupError:
    """Returns the error for processes that did not appear in time."""
    return StartupError(
        f"{names} did not appear within {timeout:g} s: start {'it' if count == 1 else 'them'}, check that the address"
        " in TF_CONFIG can be reached from here, or raise --startup_timeout."
    )


def bind_everywhere(port: int) -> socket.socket:
    """Returns a TCP socket bound to `port` (0: any free port) on all interfaces, with sharing allowed (SO_REUSEPORT).

    Uses IPv6 and IPv4 if the machine has both, like TensorFlow's gRPC server. Raises OSError if the port is taken.
    """
    for family in (socket.AF_INET6, socket.AF_INET) if socket.has_dualstack_ipv6() else (socket.AF_INET,):
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if port:  # ignores connections of an earlier run that are still in TIME_WAIT
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(("", port))
            return bound
        except OSError as error:
            bound.close()
            if family == socket.AF_INET or error.errno == errno.EADDRINUSE:
                raise
    raise AssertionError("every family either returns or raises")


def bind_shared(port: int, host: str) -> socket.socket:
    """Binds a shared port, like `bind_everywhere`, at one IP address of this machine; "": on all interfaces."""
    if not host:
        return bind_everywhere(port)
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


def _listen(cluster: Cluster) -> socket.socket:
    """Opens a socket that answers probes at this worker's port. Raises StartupError."""
    host, _, port = cluster.address.rpartition(":")
    in_use = StartupError(
        f"Port {port} of {cluster.name(cluster.rank)} is in use on this machine: stop the process that listens on it,"
        " or change the address in TF_CONFIG."
    )
    # If another server allows sharing, we could bind its port, and it would take some of our connections: so probe
    # first. The name in TF_CONFIG may belong to a service in front of this machine, so it is probed only if local.
    if answers(f"127.0.0.1:{port}") or (is_local(host) and answers(cluster.address)):
        raise in_use
    try:
        listener = bind_everywhere(int(port))
        listener.listen(4096)  # the kernel reduces it to its own limit
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise in_use from None
        raise StartupError(
            f"Port {port} of {cluster.name(cluster.rank)} cannot be opened ({error.strerror}): choose a port of 1024 or"
            " above in TF_CONFIG."
        ) from None
    listener.setblocking(False)
    return listener


def _accept_probes(listener: socket.socket) -> int:
    """Empties the queue of connections and returns how many there were.

    In a large cluster the queue would otherwise fill up, and later peers would get no answer.
    """
    accepted = 0
    with contextlib.suppress(BlockingIOError):
        while accepted < _PROBES_ACCEPTED_AT_ONCE:  # endless probes must not block us
            connection, _ = listener.accept()
            accepted += 1
            # Closed by a reset: after an orderly close the port would still be in TIME_WAIT when TensorFlow needs it.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
    return accepted


def answers(address: str) -> bool:
    """Returns whether a process listens at host:port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_SECONDS) as connection:
            # The kernel may choose the target port as the local port, and so connect a socket to itself.
            return connection.getsockname() != connection.getpeername()
    except (OSError, UnicodeError) as error:  # also if the name is not known yet, or is not a valid name
        # The peer may already have closed the connection (_accept_probes): that is an answer, too.
        return getattr(error, "errno", None) in (errno.ECONNRESET, errno.ENOTCONN)


def is_local(host: str) -> bool:
    """Returns whether a name or address belongs to this machine: only such addresses can be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
        return True
    except (OSError, UnicodeError):
        return False
