"""Groups of worker processes that each run hundreds of cases, since starting TensorFlow takes longer than a case.

A group that dies or does not answer is ended, and a new one starts for the next case. The same happens to a group whose
processes have grown (TensorFlow keeps much of each graph that it has traced) and, if there would be too many processes,
to the group that has been idle longest.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from tests.e2e.job import ENVIRONMENT
from tests.fuzz import refusals, stores
from tests.fuzz.space import group_of
from tests.fuzz.worker import KEY
from tfdist.launcher.local_job import LocalJob

Key = tuple[str, int]  # kind and workers of a group

LARGEST = 1.25e9  # bytes of memory up to which a process takes another case
MOST_PROCESSES = 12  # in all groups together
START_SECONDS, CASE_SECONDS, OTHERS_SECONDS = 300.0, 600.0, 120.0  # enough on a busy machine


class Group:
    """The processes of one kind: "local", "sockets", "tensorflow", "horovod", "servers"."""

    def __init__(self, kind: str, workers: int, environment: Mapping[str, str]):
        self._folder = tempfile.TemporaryDirectory(prefix="tfdist-fuzz-")
        with Listener(("127.0.0.1", 0), authkey=KEY) as listener:
            port = str(listener.address[1])
            servers = 1 if kind == "servers" else 0
            self._job = LocalJob(
                [sys.executable, "-m", "tests.fuzz.worker", port, kind],
                workers,
                Path(self._folder.name),
                pin=False,
                environment={**ENVIRONMENT, **environment},
                show=set(),
                servers=servers,
            )
            self._job.start()
            listener._listener._socket.settimeout(1.0)
            # With parameter servers, only the chief connects.
            connections = [self._accepted(listener) for _ in range(1 if servers else workers)]
        ranks = {connection.recv(): connection for connection in connections}
        self._connections: list[Connection] = [ranks[rank] for rank in sorted(ranks)]

    def _accepted(self, listener: Listener) -> Connection:
        """Returns a connection to a process that has started. Raises RuntimeError if one has ended, or none connects in
        time.
        """
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                return listener.accept()
            except TimeoutError:
                ended = [rank for rank, worker in enumerate(self._job.workers) if worker.process.poll() is not None]
                if ended or time.monotonic() > deadline:
                    raise RuntimeError(f"no worker has started: {self._last_words(ended[0] if ended else 0)}") from None

    def run(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the answers of all ranks. A rank that is gone or hangs gets {"failed": ..., "gone": True}; the group
        is then unusable.
        """
        with contextlib.suppress(OSError):
            for connection in self._connections:
                connection.send(case)
        answers: dict[int, dict] = {}
        deadline = time.monotonic() + CASE_SECONDS
        while len(answers) < len(self._connections) and time.monotonic() < deadline:
            waiting = [connection for rank, connection in enumerate(self._connections) if rank not in answers]
            for connection in wait(waiting, timeout=1.0):
                rank = self._connections.index(connection)
                try:
                    answers[rank] = connection.recv()
                except (EOFError, ConnectionError):
                    answers[rank] = {
                        "failed": f"the process of rank {rank} ended: {self._last_words(rank)}",
                        "gone": True,
                    }
            if any("parts" not in found for found in answers.values()):
                deadline = min(deadline, time.monotonic() + OTHERS_SECONDS)
        return [
            answers.get(rank, {"failed": f"rank {rank} did not answer: {self._last_words(rank)}", "gone": True})
            for rank in range(len(self._connections))
        ]

    def _last_words(self, rank: int) -> str:
        log = Path(self._folder.name) / f"worker-{rank}.log"
        return log.read_text(errors="replace")[-2000:] if log.exists() else ""

    def memory(self) -> int:
        """Returns the memory of the largest process, in bytes."""
        return max(_resident(worker.process.pid) for worker in self._job.workers)

    def close(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError, ValueError):
                connection.send(None)
        self._job.kill()
        self._job.wait()
        self._folder.cleanup()


def _resident(pid: int) -> int:
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:  # it has ended
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def processes_of(kind: str, workers: int) -> int:
    """The number of processes in a group of a kind; with parameter servers, a chief and a server are added."""
    return workers + 2 if kind == "servers" else workers


class Pool:
    """All groups, each started when a case first needs it. Threads may share it; a group runs one case at a time.

    environment: variables for its processes, in addition to those of all tests.
    """

    def __init__(self, most: int = MOST_PROCESSES, environment: Mapping[str, str] | None = None):
        self._environment = environment or {}
        self._groups: dict[Key, Group] = {}  # in order of last use
        self._locks: defaultdict[Key, threading.Lock] = defaultdict(threading.Lock)
        self._most = most

    def start(self, runtimes: Iterable[str]) -> None:
        """Starts the groups of these runtimes now. Their processes end with the thread that started them."""
        for key in sorted({group_of(name) for name in runtimes} - set(self._groups)):
            self._make_room(processes_of(*key), key)
            self._groups[key] = Group(*key, self._environment)

    def _make_room(self, count: int, wanted: Key) -> None:
        for key, group in list(self._groups.items()):
            if sum(processes_of(*each) for each in list(self._groups)) + count <= self._most:
                return
            if key != wanted and self._locks[key].acquire(blocking=False):  # else it is running a case
                try:
                    if self._groups.get(key) is group:
                        self._groups.pop(key).close()
                finally:
                    self._locks[key].release()

    def run(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        """Runs a case in its group, which is started if needed. Returns the answers of all ranks."""
        key = group_of(case["runtime"])
        with self._locks[key]:
            self.start([case["runtime"]])
            group = self._groups[key] = self._groups.pop(key)
            answers = group.run(stores.reachable(case))
            failed = sum("failed" in answer for answer in answers)
            # If all ranks failed, none of them is waiting for another.
            unfit = any("gone" in answer for answer in answers) or 0 < failed < len(answers)
            if unfit or refusals.breaks_off(case) or group.memory() > LARGEST:
                self._groups.pop(key).close()
        return answers

    def close(self) -> None:
        while self._groups:
            self._groups.popitem()[1].close()
