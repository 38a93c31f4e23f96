"""The part of a Ray job that runs on the nodes: an actor that starts one worker as a separate process and controls it.

It is a separate process because TensorFlow's state ends only with its process, and because exit codes, signals and
output are then the same as on one machine. The kernel ends it when the actor ends (processes.spawn), and so also when
its node does.
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
from tfdist.control.processes import output_of, send_signal, spawn

_ANSWER_SECONDS = 0.2  # for which `exchange` waits for output or the end
_LARGEST_ANSWER = 1 << 20  # bytes
_LARGEST_BACKLOG = 1 << 24  # bytes of output not yet fetched; beyond that, writes of the worker block


class RayWorker:
    """Starts and controls a worker's process. The launcher calls its methods one at a time.

    host: address of this node; by default the one that Ray uses.
    """

    _process: subprocess.Popen  # set by `start`

    def __init__(self, host: str = ""):
        if not host:
            import ray.util

            host = ray.util.get_node_ip_address()
        self._port = PortReservation(1, f"[{host}]" if ":" in host else host)
        self._output, self._begin = bytearray(), 0  # output not yet fetched, and its offset in the whole output
        self._news = threading.Condition()
        self._started = self._ended = False
        self._passed = 0  # number of signals passed on so far

    def address(self) -> str:
        """Returns the host:port that is reserved for the worker."""
        return self._port.addresses[0]

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], folder: str) -> str:
        """Starts this node's Python with `arguments`, in `folder` if it exists. Returns "", or why this failed.

        `environment` is added to the actor's own environment; the two PYTHONPATHs are joined. May be repeated if the
        answer was lost.
        """
        if self._started:
            return ""
        with contextlib.suppress(OSError):
            os.chdir(folder)
        paths = [path for path in (environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH")) if path]
        environment = {**os.environ, **environment, **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})}
        try:
            self._process = spawn([sys.executable, *arguments], environment, None)
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
        self._started = True
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
        """Passes signals on to the worker, and returns (its output after the first `received` bytes, exit code).

        The code is None while the worker runs or there is more to fetch. Waits a moment for output or the end. May be
        repeated with the same arguments if an answer was lost. before: number of signals given in earlier calls; None:
        all of these are new.
        """
        new = signals if before is None else signals[self._passed - before :]
        self._passed += len(new)
        for number in new if self._process.returncode is None else ():
            send_signal(self._process, number)
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
        """Returns the exit code once the worker has ended and its output is complete; None before."""
        if self._process.returncode is None and os.waitid(
            os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
        ):
            send_signal(self._process, signal.SIGKILL)  # its child processes; must come before its id can be reused
            self._process.wait()
            with self._news:  # a process that left its session may keep the pipe open
                self._news.wait_for(lambda: self._ended or len(self._output) >= _LARGEST_BACKLOG, 2)
        return self._process.returncode
