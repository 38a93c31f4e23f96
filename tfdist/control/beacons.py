"""Status messages between the workers of a job, independent of the training: where each worker is, and why one failed.

Every worker sends a small UDP datagram to every other about once a second: rank, section, calls, where its main thread
is. Datagrams from strangers are dropped (datagrams.py). So when something is stuck, or a peer is lost, each worker can
name the rank that is the cause, whatever the state of TensorFlow's own connections; and the error of the first worker
that failed appears in every log. If no new start mends it, the others end with its exit code. Losing a datagram does no
harm.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tfdist.control import datagrams, sections, wire
from tfdist.control.cluster import Cluster
from tfdist.control.packet_filter import bind_address, marked_only
from tfdist.control.terminal import printable
from tfdist.control.watchdog import Watchdog, main_thread_at

ENDPOINT_BYTES = 320  # a host name has at most 253 bytes, plus a port and a nonce
_MOST_WORDS = 400  # bytes as JSON, for an error and for a source location, so that a report fits into a datagram
_SILENT_INTERVALS = 3.0
_REPEAT = 3  # times that an error is sent: datagrams may be lost


@dataclass
class Report:
    """The last report received from a worker."""

    heard: float  # when it was received: monotonic seconds, by this process's clock
    section: str = sections.START_UP
    seconds: float = 0.0  # time in that section when the report was sent
    calls: int = 0  # number of sections entered
    at: str = ""  # where the main thread is
    waiting_for: int | None = None  # the rank whose data it waits for, if the runtime knows it
    error: str = ""  # the error with which it failed
    code: int = 0  # the exit code with which it ends then; 0: unknown
    error_time: float = 0.0  # Unix seconds, by the sender's clock
    secondary: bool = False  # it failed because it lost another worker
    rank: int = -1


class Beacons:
    """Sends this worker's reports and keeps the last report of each other worker.

    Args:
      exchange: sends this worker's endpoint (see wire.py) to all and returns all in rank order (a collective call).
      waiting_for: returns the rank that this worker waits for at the moment; None: nobody, or unknown.
      interval: seconds between two reports.
    """

    def __init__(
        self,
        cluster: Cluster,
        watchdog: Watchdog,
        exchange: Callable[[str], Sequence[str]],
        waiting_for: Callable[[], int | None],
        interval: float = 1.0,
    ):
        self.cluster, self.watchdog, self.waiting_for = cluster, watchdog, waiting_for
        self.interval = interval * max(1.0, cluster.size / 64)  # N workers send N * (N - 1) datagrams
        self._lock = threading.Lock()
        self._error, self._code, self._error_time, self._secondary = "", 0, 0.0, False
        self._closed = threading.Event()
        self._socket = _open(bind_address(cluster.address, cluster.peers))
        endpoints = exchange(wire.endpoint(cluster.address.rpartition(":")[0], self._socket))
        self._seals = datagrams.Seals(cluster.secret, cluster.rank, "beacons", *endpoints)
        self._sending = threading.Lock()
        marked_only(self._socket, self._seals.mark)
        self._peers = {
            rank: _resolve(endpoint, self._socket.family)
            for rank, endpoint in enumerate(endpoints)
            if rank != cluster.rank
        }
        self._reports = {rank: Report(time.monotonic()) for rank in self._peers}
        for target in (self._send_always, self._receive_always):
            threading.Thread(target=target, name=f"tfdist-beacons{target.__name__}", daemon=True).start()

    # -- called by the session -------------------------------------------------------------------------------------

    def announce(self, error: str, secondary: bool = False, code: int = 0) -> None:
        """Tells all other workers why this one ends. secondary: it ends because it lost another worker. code: the exit
        code of the error; 0: unknown."""
        self._error, self._code, self._error_time, self._secondary = error, code, time.time(), secondary
        for _ in range(_REPEAT):
            self._send()

    def first_error(self, wait: float) -> Report | None:
        """Returns the report of the worker that failed first, by the workers' clocks. Secondary failures (workers that
        lost another) come last; waits up to `wait` seconds for a failure that is not secondary."""
        deadline = time.monotonic() + wait
        while True:
            with self._lock:
                failed = [report for report in self._reports.values() if report.error]
            first = min(failed, key=lambda report: (report.secondary, report.error_time), default=None)
            if (first and not first.secondary) or time.monotonic() > deadline:
                return first
            time.sleep(0.05)

    def wait_for_errors(self, wait: float) -> None:
        """Waits until all other workers have reported an error, at most `wait` seconds, and no longer than this one
        receives reports."""
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline and not self._closed.is_set():
            with self._lock:
                if all(report.error for report in self._reports.values()):
                    return
            time.sleep(0.02)

    def silent(self) -> list[int]:
        """Returns the ranks from which nothing has been received for a while."""
        limit = time.monotonic() - _SILENT_INTERVALS * self.interval
        with self._lock:
            return sorted(rank for rank, report in self._reports.items() if report.heard < limit)

    def culprits(self) -> list[int]:
        """Returns the ranks that the others seem to wait for; [] if none is behind.

        These are the silent ranks; if there are none, those that are behind in the sections of the run; if there are
        none, those that wait for nobody while all others wait.
        """
        if silent := self.silent():
            return silent
        reports = self._all()
        fewest = min(report.calls for report in reports.values())
        behind = sorted(rank for rank, report in reports.items() if report.calls == fewest)
        if len(behind) < len(reports):
            return behind
        busy = sorted(rank for rank, report in reports.items() if report.waiting_for is None)
        return busy if 0 < len(busy) < len(reports) else []

    def describe(self, rank: int) -> str:
        """Returns a rank's name and its last known state, as part of a sentence."""
        report = self._all()[rank]
        ago = time.monotonic() - report.heard
        heard = f", last heard from {ago:.1f} s ago" if ago > _SILENT_INTERVALS * self.interval else ""
        return (
            f'{self.cluster.name(rank)}{heard}, in section "{report.section}" for {report.seconds + ago:.1f} s'
            f"{f', at {report.at}' if report.at else ''}"
        )

    def close(self) -> None:
        """Stops sending and receiving."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.close()

    # -- threads ---------------------------------------------------------------------------------------------------

    def _own(self) -> Report:
        return Report(
            heard=time.monotonic(),
            section=self.watchdog.name,
            seconds=self.watchdog.seconds(),
            calls=self.watchdog.calls,
            at=main_thread_at(),
            waiting_for=self.waiting_for(),
            error=self._error,
            code=self._code,
            error_time=self._error_time,
            secondary=self._secondary,
            rank=self.cluster.rank,
        )

    def _all(self) -> dict[int, Report]:
        with self._lock:
            return {**self._reports, self.cluster.rank: self._own()}

    def _send(self) -> None:
        message: dict[str, Any] = {name: value for name, value in vars(self._own()).items() if name != "heard"}
        for name in ("section", "at", "error"):
            message[name] = _shortened(message[name])
        with self._sending:  # so that the stamps increase in the order of sending
            data = self._seals.seal(json.dumps(message).encode())
            for address in self._peers.values():
                with contextlib.suppress(OSError):  # a peer is gone, or the network is down: noticed elsewhere
                    self._socket.sendto(data, address)

    def _send_always(self) -> None:
        while not self._closed.is_set():
            self._send()
            self._closed.wait(self.interval)

    def _receive_always(self) -> None:
        while not self._closed.is_set():
            try:
                opened = self._seals.open(self._socket.recv(datagrams.MOST_BYTES + 1))
            except OSError:
                if self._closed.wait(0.1):
                    return
                continue
            report = opened and parse_report(*opened, self.cluster.size)
            if report:
                with self._lock:
                    if report.rank in self._reports:
                        self._reports[report.rank] = report


def _shortened(text: str) -> str:
    """Returns a beginning of a text that fits into `_MOST_WORDS` bytes of JSON."""
    while (excess := len(json.dumps(text)) - _MOST_WORDS) > 0:
        text = text[: -(excess // 12 + 1)]  # a character takes up to twelve bytes
    return text


def parse_report(rank: int, data: bytes, size: int) -> Report | None:
    """Parses a report sent by rank `rank` of `size` and makes it printable; None if the data are not a report."""
    try:
        message = wire.parse_object(data)
    except ValueError:
        return None
    waiting_for = message.pop("waiting_for", None)
    message.setdefault("code", 0)
    report = Report(time.monotonic(), waiting_for=waiting_for)
    expected = {name: type(value) for name, value in vars(report).items() if name not in ("heard", "waiting_for")}
    if message.get("rank") != rank or {name: type(value) for name, value in message.items()} != expected:
        return None
    if waiting_for is not None and (type(waiting_for) is not int or not 0 <= waiting_for < size):
        return None
    for name, value in message.items():
        setattr(report, name, printable(value) if isinstance(value, str) else value)
    return report if math.isfinite(report.seconds) and math.isfinite(report.error_time) else None


def _open(host: str) -> socket.socket:
    """Opens a UDP socket at an IP address of this machine; "": on all interfaces."""
    if host:
        opened = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
        opened.bind((host, 0))
        return opened
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            opened = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            opened.bind(("", 0))
            return opened
    opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    opened.bind(("", 0))
    return opened


def _resolve(endpoint: str, family: int) -> tuple:
    host, port = wire.address_of(endpoint)
    flags = socket.AI_V4MAPPED | socket.AI_ALL if family == socket.AF_INET6 else 0
    return socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM, flags=flags)[0][4]
