"""The part of a Ray job that runs on the nodes: an actor that starts one worker as a process of its own and speaks for
it.

A process, because TensorFlow's state ends with the process only, and because exit codes, signals and output are then
the same as on one machine. The kernel ends it when the actor ends (processes.spawn), and with that when its node does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from tfdist.control.preflight import PortReservation
from tfdist.control.processes import output_of, spawn

_ANSWER_SECONDS = 0.2  # that `exchange` waits for news
_LARGEST_ANSWER = 1 << 20  # bytes
_LARGEST_BACKLOG = 1 << 24  # bytes that nobody has fetched; then the worker's own writing waits


class RayWorker:
    """A worker's process and its control. Its methods are called one at a time, by the launcher.

    `host`: of this node, by default as Ray knows it.
    """

    _process: subprocess.Popen  # from `start` on

    def __init__(self, host: str = ""):
        if not host:
            import ray.util

            host = ray.util.get_node_ip_address()
        self._port = PortReservation(1, f"[{host}]" if ":" in host else host)
        self._output, self._begin = bytearray(), 0  # what has not been fetched, and its place in all that was written
        self._news = threading.Condition()
        self._ended = False
        self._passed = 0  # signals that were passed on

    def address(self) -> str:
        """host:port that is reserved for the worker."""
        return self._port.addresses[0]

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], folder: str) -> str:
        """Starts this node's Python with `arguments`, in `folder` where there is such a folder. Returns "", or why it
        cannot be.

        `environment` comes on top of the actor's own; of PYTHONPATH both count.
        """
        with contextlib.suppress(OSError):
            os.chdir(folder)
        paths = [path for path in (environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH")) if path]
        environment = {**os.environ, **environment, **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})}
        try:
            self._process = spawn([sys.executable, *arguments], environment, None)
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
        threading.Thread(target=self._read, name="tfdist-read", daemon=True).start()
        return ""

    def _read(self) -> None:
        with output_of(self._process) as pipe:
            while data := pipe.read1(65536):
                with self._news:
                    self._news.wait_for(lambda: len(self._output) < _LARGEST_BACKLOG)
                    self._output += data
                    self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def exchange(self, received: int, signals: Sequence[int], before: int | None = None) -> tuple[bytes, int | None]:
        """Passes signals on to the worker, and returns (what it wrote since its first `received` bytes, exit code).

        The code is None while it runs or there is more to fetch. Waits a moment for news. May be repeated with the same
        arguments if an answer was lost. before: how many signals were given in calls before; None: these are new.
        """
        new = signals if before is None else signals[self._passed - before :]
        self._passed += len(new)
        for number in new:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
        with self._news:
            del self._output[: received - self._begin]
            self._begin = received
            self._news.notify_all()
            self._news.wait_for(lambda: self._output or self._ended, _ANSWER_SECONDS)
        code = self._code()
        with self._news:
            data = bytes(self._output[:_LARGEST_ANSWER])
            return data, code if len(data) == len(self._output) else None

    def _code(self) -> int | None:
        """The exit code once the worker has ended and its output is complete."""
        if self._process.returncode is None and os.waitid(
            os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
        ):
            # What it leaves behind; before its number can be given to another process.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            with self._news:  # a process that left its session may hold the pipe open
                self._news.wait_for(lambda: self._ended or len(self._output) >= _LARGEST_BACKLOG, 2)
        return self._process.returncode
