"""Starts processes that end with the launcher, and spare processes that have already done their imports."""

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

STANDBY_VARIABLE = "TFDIST_STANDBY"  # if set: import everything, then wait for a line on standard input (train.py)
_LIBC = ctypes.CDLL(None)  # looked up before any fork


def spawn(
    command: Sequence[str], environment: Mapping[str, str], affinity: set[int] | None, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen:
    """Starts `command` with its output in a pipe. Raises OSError or SubprocessError.

    The process gets its own session, so that the terminal's signals reach the launcher only, and so that it can be
    killed together with its children. The kernel kills it if the launcher is killed and cannot do so itself.
    """
    parent = os.getpid()

    def in_child() -> None:
        _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)  # until the worker has a handler: the default action would end it
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


def send_signal(process: subprocess.Popen, number: int) -> None:
    """Sends a signal to a process that `spawn` started and that nobody has waited for; SIGKILL also to its child
    processes. They get no other signal: a program that reads the worker's data would end before the worker comes to the
    boundary at which it saves. When the worker has ended, they are killed."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.killpg if number == signal.SIGKILL else os.kill)(process.pid, number)


def output_of(process: subprocess.Popen) -> BufferedReader:
    """Returns the pipe with the output of a process that `spawn` started."""
    assert isinstance(process.stdout, BufferedReader)
    return process.stdout


def is_stopped(pid: int) -> bool:
    """Returns whether a process is stopped (by SIGSTOP or a debugger)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


class Standbys:
    """Spare processes, one per rank.

    Each costs the memory of an idle process, and saves the time of the imports when a job is restarted.
    """

    def __init__(self) -> None:
        self._spares: dict[tuple[int, int], subprocess.Popen] = {}  # (rank, workers) -> process

    def start(
        self, rank: int, workers: int, environment: Mapping[str, str], affinity: set[int] | None, command: Sequence[str]
    ) -> None:
        """Starts the spare process of a rank, if there is none.

        It gets the GPUs, threads and cores of this rank in a job of `workers` workers.
        """
        if (rank, workers) not in self._spares:
            with contextlib.suppress(OSError, subprocess.SubprocessError):  # without one the next start is only slower
                self._spares[rank, workers] = spawn(
                    command, {**environment, STANDBY_VARIABLE: "1"}, affinity, subprocess.PIPE
                )

    def take(
        self, rank: int, workers: int, environment: Mapping[str, str], command: Sequence[str]
    ) -> subprocess.Popen | None:
        """Gives the spare process its task and returns it; None if there is no suitable one."""
        spare = self._spares.pop((rank, workers), None)
        if spare is None or spare.poll() is not None:
            return None
        assert spare.stdin is not None
        task = {"environment": dict(environment), "arguments": list(command[3:])}  # after python -m tfdist.train
        try:
            spare.stdin.write(f"{json.dumps(task)}\n".encode())
            spare.stdin.close()
        except OSError:
            _kill(spare)
            return None
        return spare

    def close(self) -> None:
        """Ends all spare processes."""
        for spare in self._spares.values():
            _kill(spare)
        self._spares.clear()


def _kill(process: subprocess.Popen) -> None:
    send_signal(process, signal.SIGKILL)
    process.wait()


def wait_as_standby(stdin: IO[str]) -> list[str]:
    """Runs in the spare process: waits for its task, takes over the environment, and returns the arguments.

    Ends the process if the launcher is gone.
    """
    line = stdin.readline()
    if not line:
        os._exit(0)
    task = json.loads(line)
    os.environ.pop(STANDBY_VARIABLE, None)
    os.environ.update(task["environment"])
    return task["arguments"]
