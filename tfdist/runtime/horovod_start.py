"""Starts Horovod: its settings, the rendezvous in which its processes find each other, and hvd.init().

Horovod reads everything from the environment, once, in hvd.init(). If a peer is missing, it fails after a time-out with
a message in its own terms. So all processes first meet on the same rendezvous server under tfdist's own keys, where a
missing process can be named.
"""

from __future__ import annotations

import contextlib
import http.client
import math
import os
import socket
import time
from collections.abc import Iterator
from types import ModuleType

from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import PeerLostError, StartupError, UnsupportedError
from tfdist.control.horovod_env import PORT, WRITTEN, Placement, placement
from tfdist.control.packet_filter import bind_address
from tfdist.control.preflight import bind_everywhere, bind_shared
from tfdist.control.user_errors import first_line

_PAUSE_SECONDS = 0.1
# Horovod 0.28.1 writes past the end of a vector when it is started again in a process in which these were set.
_ONCE_IN_A_PROCESS = ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME")
_LONGEST_STALL_CHECK = 60.0  # seconds until Horovod warns of a stalled tensor, and between two checks


def load() -> ModuleType:
    """Imports horovod.tensorflow. Raises UnsupportedError if it is missing, or was not built for this TensorFlow."""
    try:
        import horovod.tensorflow as hvd  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "horovod":
            raise UnsupportedError(
                f"--strategy=horovod needs the package {error.name}: run scripts/install_horovod.sh, which installs it."
            ) from None
        raise UnsupportedError(
            "--strategy=horovod, but Horovod is not installed: run scripts/install_horovod.sh, which builds it for the"
            " installed TensorFlow."
        ) from None
    except Exception as error:  # any error of the loader, if the library is for another TensorFlow
        raise UnsupportedError(
            "--strategy=horovod: the installed Horovod does not fit this TensorFlow"
            f" ({(first_line(error) or type(error).__name__)[:200]}): run scripts/install_horovod.sh --force, which"
            " rebuilds it."
        ) from None
    return hvd


def start(cluster: Cluster, config: Config) -> tuple[ModuleType, Placement]:
    """Calls hvd.init() with all peers; returns Horovod and the placement of this process.

    Raises: UnsupportedError without Horovod, ClusterError or StartupError if the peers cannot be found.
    """
    hvd = load()
    if hvd.is_initialized():  # this process was in another group of workers before
        hvd.shutdown()
    if not cluster.started_by:
        for name in WRITTEN:
            os.environ.pop(name, None)
    place = placement(cluster, os.environ)
    os.environ.update({**settings(config, cluster.size), **place.variables})
    for name in _ONCE_IN_A_PROCESS if cluster.is_broken else ():
        os.environ.pop(name, None)
    if place.server and "HOROVOD_GLOO_IFACE" not in os.environ:
        os.environ["HOROVOD_GLOO_IFACE"] = _interface(*place.server)
    with _open_port(cluster, place):
        if place.server:
            wait_for_all(place.server, cluster, config.cluster.startup_timeout)
        try:
            hvd.init()
        except ValueError as error:
            raise StartupError(
                f"Horovod did not start ({(first_line(error) or type(error).__name__)[:200]}): its own lines above say"
                " why; on machines with several networks set HOROVOD_GLOO_IFACE to the one between the workers."
            ) from None
    return hvd, place


def settings(config: Config, size: int) -> dict[str, str]:
    """tfdist's flags as Horovod's environment variables, for a job of `size` processes.

    Horovod's background threads communicate in every cycle, also while Python saves or evaluates. So
    --heartbeat_timeout can limit their silence, and --collective_timeout a collective that some rank never enters.
    """
    stall = config.strategy.collective_timeout
    # Which tensors share a buffer depends on which are ready; and a tensor's place in the buffer decides in which order
    # the ranks' parts are added. The sum of two parts does not depend on their order.
    fuse = not config.run.deterministic or size <= 2
    return {
        "HOROVOD_FUSION_THRESHOLD": str(int(config.strategy.horovod_fusion_mb * 2**20) if fuse else 0),
        "HOROVOD_CYCLE_TIME": str(config.strategy.horovod_cycle_ms),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(math.ceil(config.cluster.heartbeat_timeout)),
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(
            math.ceil(min(_LONGEST_STALL_CHECK, stall / 2 or _LONGEST_STALL_CHECK))
        ),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(math.ceil(stall)),
        "HOROVOD_LOG_LEVEL": os.environ.get("HOROVOD_LOG_LEVEL", "error"),
    }


def wait_for_all(server: tuple[str, int], cluster: Cluster, timeout: float) -> None:
    """Returns when every rank has arrived. Raises StartupError, which names the missing ranks, after `timeout` seconds,
    and PeerLostError when a rank is known to have died."""
    deadline = time.monotonic() + timeout
    missing = list(range(cluster.size))
    is_broken = cluster.is_broken or (lambda: False)
    while not _request(server, "PUT", cluster.rank) and not is_broken():
        if time.monotonic() > deadline:
            raise StartupError(
                f"Horovod's rendezvous at {server[0]}:{server[1]} did not answer within {timeout:g} s: start rank 0,"
                " check that its address can be reached from here, or raise --startup_timeout."
            )
        time.sleep(_PAUSE_SECONDS)
    while missing:
        missing = [rank for rank in missing if not _request(server, "GET", rank)]
        if missing and time.monotonic() > deadline:
            raise StartupError(
                f"{', '.join(map(cluster.name, missing))} did not appear within {timeout:g} s: start"
                f" {'it' if len(missing) == 1 else 'them'}, or raise --startup_timeout."
            )
        if is_broken():
            raise PeerLostError("A worker died before all had met in Horovod's rendezvous: look at its log.")
        if missing:
            time.sleep(_PAUSE_SECONDS)


def _request(server: tuple[str, int], method: str, rank: int) -> bool:
    connection = http.client.HTTPConnection(*server, timeout=10)  # urllib would ask a proxy
    try:
        connection.request(method, f"/tfdist/{rank}", body=b"here" if method == "PUT" else None)
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@contextlib.contextmanager
def _open_port(cluster: Cluster, place: Placement) -> Iterator[None]:
    """Answers on this worker's own port until hvd.init() has returned, when all workers have found each other.

    Rank 0: the rendezvous server, if tfdist runs it. Other ranks: probes of peers that are still in the preflight.
    """
    if place.serve and place.server and cluster.rank == 0:
        server = _rendezvous_server(place.server[1], bind_address(cluster.address, cluster.peers))
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
    elif place.serve and cluster.address:
        with bind_everywhere(int(cluster.address.rpartition(":")[2])) as listener:
            listener.listen(4096)
            yield
    else:
        yield


def _rendezvous_server(port: int, host: str):
    """Starts Horovod's server on a port that a launcher may hold for this process."""
    import threading

    from horovod.runner.http.http_server import (  # pyright: ignore[reportMissingImports]
        RendezvousHandler,
        RendezvousHTTPServer,
    )

    class Server(RendezvousHTTPServer):
        daemon_threads = True
        request_queue_size = 4096

        def server_bind(self) -> None:
            self.socket.close()
            self.socket = bind_shared(self.server_address[1], host)  # shares the port with its reservation
            self.server_name, self.server_port = self.server_address = self.socket.getsockname()[:2]

        def handle_error(self, request, client_address) -> None:
            """Ignores errors: a preflight probe is a connection without a request, which needs no traceback."""

    try:
        server = Server(("", port), RendezvousHandler, verbose=0)
    except OSError as error:
        raise StartupError(
            f"Horovod's rendezvous cannot listen on port {port} ({error.strerror}): stop the process that does, or"
            f" choose another port in TF_CONFIG or {PORT}."
        ) from None
    threading.Thread(target=server.serve_forever, name="tfdist-rendezvous", daemon=True).start()
    return server


def _interface(host: str, port: int) -> str:
    """The network interface over which `host` is reached.

    Gloo would look up this machine's name, which is often 127.0.1.1.
    """
    import psutil  # a requirement of Horovod

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # sends nothing
        except OSError as error:
            raise StartupError(
                f"Rank 0's address {host} cannot be reached from here ({error}): check the name, and the network."
            ) from None
        own_address = probe.getsockname()[0]
    return next(
        (
            name
            for name, addresses in psutil.net_if_addrs().items()
            for address in addresses
            if address.address == own_address
        ),
        "",
    )
