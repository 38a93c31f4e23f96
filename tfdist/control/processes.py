"""Starting processes that end with the launcher, and spare ones that have done their imports."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import IO

STANDBY_VARIABLE = "TFDIST_STANDBY"  # set: import all, then wait for a line on standard input (train.py)
_LIBC = ctypes.CDLL(None)  # looked up before any fork


def spawn(
    command: Sequence[str], environment: Mapping[str, str], affinity: set[int] | None, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen:
    """Starts `command` with its output in a pipe. Raises OSError or SubprocessError.

    It has a session of its own, so that signals of the terminal reach the launcher only and it can be ended with all
    that it started; and the kernel ends it if the launcher is killed without a chance to do so itself.
    """
    parent = os.getpid()

    def in_child() -> None:
        _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)  # until the worker has a handler: by default it would end it
        if affinity:
            os.sched_setaffinity(0, affinity)

    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=dict(environment),
        preexec_fn=in_child,
    )


def output_of(process: subprocess.Popen) -> BufferedReader:
    """The pipe with the output of a process that `spawn` started."""
    assert isinstance(process.stdout, BufferedReader)
    return process.stdout


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP, or a debugger)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


class Standbys:
    """A spare process per rank.

    It costs the memory of an idle process, and saves the import when a job is started again.
    """

    def __init__(self) -> None:
        self._spares: dict[tuple[int, int], subprocess.Popen] = {}  # (rank, workers) -> process

    def start(
        self, rank: int, workers: int, environment: Mapping[str, str], affinity: set[int] | None, command: Sequence[str]
    ) -> None:
        """Starts the spare of a rank, if there is none.

        It gets the GPUs, threads and cores of that rank of that many workers.
        """
        if (rank, workers) not in self._spares:
            with contextlib.suppress(OSError, subprocess.SubprocessError):  # without one the next start is only slower
                self._spares[rank, workers] = spawn(
                    command, {**environment, STANDBY_VARIABLE: "1"}, affinity, subprocess.PIPE
                )

    def take(
        self, rank: int, workers: int, environment: Mapping[str, str], command: Sequence[str]
    ) -> subprocess.Popen | None:
        """Hands over the spare, with its task; None if there is none that fits."""
        spare = self._spares.pop((rank, workers), None)
        if spare is None or spare.poll() is not None:
            return None
        assert spare.stdin is not None
        task = {"environment": dict(environment), "arguments": list(command[3:])}  # after python -m tfdist.train
        try:
            spare.stdin.write(f"{json.dumps(task)}\n".encode())
            spare.stdin.close()
        except OSError:
            return None
        return spare

    def close(self) -> None:
        """Ends all spares."""
        for spare in self._spares.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(spare.pid, signal.SIGKILL)
            spare.wait()
        self._spares.clear()


def wait_as_standby(stdin: IO[str]) -> list[str]:
    """Waits in the spare itself for its turn, takes over the environment, returns the arguments.

    Ends if nobody is left to call.
    """
    line = stdin.readline()
    if not line:
        os._exit(0)
    task = json.loads(line)
    os.environ.pop(STANDBY_VARIABLE, None)
    os.environ.update(task["environment"])
    return task["arguments"]
