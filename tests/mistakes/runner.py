"""Runs mistakes: each in its own folder, its processes started warm (tests/warm_start) or as a user starts them."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.job import ENVIRONMENT, free_ports
from tests.mistakes import modules, prepared
from tests.mistakes.damage import apply
from tests.mistakes.mistake import Mistake
from tests.warm_start import client

LIMIT_SECONDS = 90.0  # for a case; the longest of them wait a few seconds for a peer
_OTHERS_SECONDS = 40.0  # for the other processes, when one has ended
_MEMORY_BYTES = 40 * 2**30  # of address space: a number that is too large must not take the machine's memory
_REPOSITORY = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class Outcome:
    """How a process ended. code: None if it had to be killed."""

    code: int | None
    output: str
    processor_seconds: float
    seconds: float


class Runner:
    """Makes the folders that cases find (prepared.py) once. Each case has its own folder, which is removed."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="tfdist-mistakes-"))
        self._ready = self.folder / "ready"
        self._ready.mkdir()
        self._number = 0
        (self._ready / "mine.py").write_text(modules.MINE)
        with client.warm_start():
            writer = _start(["tests.mistakes.prepared", "."], self._ready, {}, self._ready / "data.log")
            trainer = _start([f"tfdist.{prepared.RUN[0]}", *prepared.RUN[1:]], self._ready, {}, self._ready / "run.log")
        for process, log in ((writer, "data.log"), (trainer, "run.log")):
            if process.wait():
                raise RuntimeError((self._ready / log).read_text())

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, mistake: Mistake, fresh: bool = False, alone: bool = False) -> list[Outcome]:
        """fresh: starts processes as a user does. alone: starts only one process, which knows of no others."""
        self._number += 1
        folder = self.folder / f"case-{self._number}"
        folder.mkdir()
        with socket.socket() as busy:
            busy.bind(("127.0.0.1", 0))
            busy.listen()
            first = free_ports(3)
            places = {
                "{busy}": str(busy.getsockname()[1]),
                **{f"{{port{index}}}": str(first + index) for index in range(3)},
            }
            try:
                self._furnish(mistake, folder)
                started = []
                for index, process in enumerate(mistake.processes[:1] if alone else mistake.processes):
                    environment = {
                        name: _filled(value, places) for name, value in process.environment.items() if not alone
                    }
                    command = [f"tfdist.{process.arguments[0]}", *process.arguments[1:]]
                    with client.real_start() if fresh else client.warm_start():
                        started.append(_start(command, folder, environment, folder / f"output-{index}.log"))
                return _await(started, folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def _furnish(self, mistake: Mistake, folder: Path) -> None:
        for name in mistake.prepared:
            shutil.copytree(self._ready / name, folder / name)
        for name, text in {"mine.py": modules.MINE, **mistake.files}.items():
            (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
        for damage in mistake.damage:
            apply(folder, damage)


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))


def _start(command: list[str], folder: Path, environment: Mapping[str, str], log: Path) -> subprocess.Popen:
    """Starts `python -m *command` as the first process of a session."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=folder,
            env={**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(folder), _REPOSITORY]), **environment},
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_limit_memory,
        )


def _filled(text: str, places: Mapping[str, str]) -> str:
    for name, value in places.items():
        text = text.replace(name, value)
    return text


def _await(started: list[subprocess.Popen], folder: Path) -> list[Outcome]:
    begun = time.monotonic()
    deadline = begun + LIMIT_SECONDS
    found: dict[int, Outcome] = {}
    while len(found) < len(started):
        for index, process in enumerate(started):
            if index in found:
                continue
            pid = process.pid
            late = time.monotonic() > deadline
            if late:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            ended, status, used = os.wait4(pid, 0 if late else os.WNOHANG)
            if ended:
                output = (folder / f"output-{index}.log").read_text(errors="backslashreplace")
                process.returncode = os.waitstatus_to_exitcode(status)
                code = None if late else process.returncode
                found[index] = Outcome(code, output, used.ru_utime + used.ru_stime, time.monotonic() - begun)
                deadline = min(deadline, time.monotonic() + _OTHERS_SECONDS)
        time.sleep(0.01)
    for (
        process
    ) in started:  # each leads a group of the processes that it has started, some of which may have outlived it
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    return [found[index] for index in range(len(started))]
