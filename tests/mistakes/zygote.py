"""Runs commands of tfdist in forks of a process that has imported TensorFlow but not used it: a start costs 10 ms, not
4 s.

TensorFlow starts its threads when a device is first asked for, so a fork before that is a process like any other.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import pkgutil
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.job import ENVIRONMENT, free_ports
from tests.mistakes import modules, prepared
from tests.mistakes.damage import apply
from tests.mistakes.mistake import Mistake, Process

COMMANDS = ("train", "launch", "evaluate", "plan", "jobs", "report", "comm", "script")
LIMIT_SECONDS = 90.0  # for a case; the longest of them wait a few seconds for a peer
_OTHERS_SECONDS = 40.0  # for the others, when one has ended
_MEMORY_BYTES = 40 * 2**30  # of addresses: a number that is too large must not take the machine's memory
_REPOSITORY = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class Outcome:
    """How a process ended. code: None if it had to be killed."""

    code: int | None
    output: str
    processor_seconds: float
    seconds: float


class Zygote:
    """Imports everything once. Each case has a folder of its own, which is removed."""

    def __init__(self):
        os.environ.update(
            {
                name: ENVIRONMENT[name]
                for name in (
                    "CUDA_VISIBLE_DEVICES",
                    "OMP_NUM_THREADS",
                    "TF_NUM_INTRAOP_THREADS",
                    "TF_NUM_INTEROP_THREADS",
                )
            },
            TF_CPP_MIN_LOG_LEVEL="2",
        )
        os.environ.pop("TF_CONFIG", None)
        importlib.import_module("tfdist.control.versions").import_keras()
        run = importlib.import_module("tfdist.run")
        used_later = [f"run.{module.name}" for module in pkgutil.iter_modules(run.__path__)]
        for name in (*COMMANDS, *used_later, "keras_fit.api", "telemetry.report_text"):
            importlib.import_module(f"tfdist.{name}")
        importlib.import_module("sklearn.datasets")
        assert len(os.listdir("/proc/self/task")) == 1 or sys.platform != "linux", "a fork would lose threads"
        self.folder = Path(tempfile.mkdtemp(prefix="tfdist-mistakes-"))
        self._ready = self.folder / "ready"
        self._ready.mkdir()
        self._number = 0
        self._prepare()

    def _prepare(self) -> None:
        (self._ready / "mine.py").write_text(modules.MINE)
        writer = self._fork(lambda: prepared.write_data(self._ready), self._ready, {}, self._ready / "data.log")
        trainer = self._fork(lambda: _command(Process(tuple(prepared.RUN))), self._ready, {}, self._ready / "run.log")
        for pid, log in ((writer, "data.log"), (trainer, "run.log")):
            if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
                raise RuntimeError((self._ready / log).read_text())

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, mistake: Mistake, fresh: bool = False, alone: bool = False) -> list[Outcome]:
        """fresh: in processes of their own instead of forks. alone: one process, which knows of no others."""
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
                    log = folder / f"output-{index}.log"
                    started.append((self._start_fresh if fresh else self._start)(process, folder, environment, log))
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

    def _start(self, process: Process, folder: Path, environment: Mapping[str, str], log: Path) -> int:
        return self._fork(lambda: _command(process), folder, environment, log)

    def _start_fresh(self, process: Process, folder: Path, environment: Mapping[str, str], log: Path) -> int:
        with log.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", f"tfdist.{process.arguments[0]}", *process.arguments[1:]],
                cwd=folder,
                env={**ENVIRONMENT, **environment},
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            ).pid

    def _fork(self, do: Callable[[], None], folder: Path, environment: Mapping[str, str], log: Path) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        if pid := os.fork():
            return pid
        code = 70
        try:
            os.setsid()
            os.chdir(folder)
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout.reconfigure(line_buffering=False)
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
            os.environ.update(environment)
            sys.path.insert(0, str(folder))
            os.environ["PYTHONPATH"] = os.pathsep.join(
                [str(folder), _REPOSITORY]
            )  # of processes that the command starts
            do()
            code = 0
        except SystemExit as end:
            code = _end(end)
        except BaseException:  # noqa: BLE001 - told in the log
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _command(process: Process) -> None:
    """As `python -m tfdist.NAME` does."""
    name, *arguments = process.arguments
    sys.argv = [f"{_REPOSITORY}/tfdist/{name}.py", *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _end(end: SystemExit) -> int:
    """As the interpreter ends: threads, exit functions, code."""
    code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    if not isinstance(end.code, int | None):
        print(end.code, file=sys.stderr)
    threading._shutdown()
    atexit._run_exitfuncs()
    return code & 255


def _filled(text: str, places: Mapping[str, str]) -> str:
    for name, value in places.items():
        text = text.replace(name, value)
    return text


def _await(started: list[int], folder: Path) -> list[Outcome]:
    begun = time.monotonic()
    deadline = begun + LIMIT_SECONDS
    found: dict[int, Outcome] = {}
    while len(found) < len(started):
        for index, pid in enumerate(started):
            if index in found:
                continue
            late = time.monotonic() > deadline
            if late:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            ended, status, used = os.wait4(pid, 0 if late else os.WNOHANG)
            if ended:
                output = (folder / f"output-{index}.log").read_text(errors="backslashreplace")
                code = None if late else os.waitstatus_to_exitcode(status)
                found[index] = Outcome(code, output, used.ru_utime + used.ru_stime, time.monotonic() - begun)
                deadline = min(deadline, time.monotonic() + _OTHERS_SECONDS)
        time.sleep(0.01)
    for pid in started:  # each leads a group: of what it has started, and of the processes of its own that outlived it
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    return [found[index] for index in range(len(started))]
