"""N workers on this machine as one job: ports, environment, output, logs, first failure, no orphans."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TextIO

from tfdist.control.exit_codes import MEANING, ExitCode

_PR_SET_PDEATHSIG = 1
_COLORS = (36, 33, 35, 32, 34, 31)
# When one worker dies the others fail too. Failures this close together (in seconds) count as one, and the one that
# did not merely lose a peer is its cause.
_SAME_FAILURE_SECONDS = 3.0
_LAST_LINES = 20
# What TensorFlow's C++ says at every import whatever its log level. Kept in the log files, not shown.
_NOISE = ("WARNING: All log messages before absl::InitializeLog()", "oneDNN custom operations are on.")


class PortReservation:
    """TCP ports that stay ours: bound with SO_REUSEPORT but not listening, for as long as the job runs.

    Nobody else can take them, and the workers (told so by TF_GRPC_REUSE_PORT) can listen on them all the same. Choosing
    a free port and letting it go again would leave a gap for another process to slip in.
    """

    def __init__(self, count: int, host: str = "127.0.0.1"):
        self._sockets = []
        for _ in range(count):
            reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reserved.bind(("", 0))
            self._sockets.append(reserved)
        self.addresses = [f"{host}:{reserved.getsockname()[1]}" for reserved in self._sockets]

    def close(self) -> None:
        for reserved in self._sockets:
            reserved.close()


@dataclass
class Worker:
    """One process of the job."""

    name: str  # "worker 0"
    process: subprocess.Popen
    log: Path
    last_lines: deque = field(default_factory=lambda: deque(maxlen=_LAST_LINES))
    ended_at: float = 0.0
    relay: threading.Thread | None = None


@dataclass(frozen=True)
class JobResult:
    """How a job ended."""

    code: int  # what the launcher exits with
    cause: str  # a sentence; "" if all went well
    exit_codes: dict[str, int]  # by worker name; negative: the signal that killed it


class LocalJob:
    """Starts workers, relays their output, stops all when one fails.

    Args:
      command: what each worker runs, for example [sys.executable, "-m", "tfdist.train", ...].
      evaluator: what an evaluator beside them runs; None for no evaluator.
      log_dir: where worker-K.log are written (appended to).
      show: ranks whose output is shown; None for all.
      pin: give each worker cores of its own and as many threads.
      grace: seconds between asking a worker to end (SIGTERM) and making it (SIGKILL).
    """

    def __init__(self, command: Sequence[str], workers: int, log_dir: Path, *, evaluator: Sequence[str] | None = None, show: set[int] | None = None,
                 pin: bool = True, grace: float = 10.0, environment: Mapping[str, str] | None = None, output: TextIO | None = None):
        self.command, self.count, self.log_dir, self.evaluator = list(command), workers, log_dir, evaluator
        self.show, self.pin, self.grace = show, pin, grace
        self.environment = dict(os.environ if environment is None else environment)
        self.output = output or sys.stdout
        self.workers: list[Worker] = []
        self._ports: PortReservation | None = None
        self._lock = threading.Lock()
        self._stopping = False

    def start(self) -> None:
        """Starts all workers. Raises OSError if the log folder cannot be written."""
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._ports = PortReservation(self.count)
        for rank in range(self.count):
            self._start_one(f"worker {rank}", self.command, worker_environment(rank, self._ports.addresses, self.pin), _cores(rank, self.count) if self.pin else None, rank)
        if self.evaluator:
            environment = worker_environment(0, self._ports.addresses, self.pin, role="evaluator")
            self._start_one("evaluator", self.evaluator, environment, None, self.count)

    def _start_one(self, name: str, command: Sequence[str], environment: dict[str, str], cores: set[int] | None, color: int) -> None:
        log = self.log_dir / f"{name.replace(' ', '-')}.log"
        file = open(log, "ab", buffering=0)  # noqa: SIM115 - closed by the relay
        file.write(f"\n===== {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(command)}\n".encode())
        parent = os.getpid()

        def in_child() -> None:
            # The kernel ends the worker if the launcher is killed without a chance to do so itself.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            if cores:
                os.sched_setaffinity(0, cores)

        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
                                   env={**self.environment, **environment}, preexec_fn=in_child)
        worker = Worker(name, process, log)
        prefix = f"[{name}] "
        if self.output.isatty():
            prefix = f"\x1b[{_COLORS[color % len(_COLORS)]}m{prefix}\x1b[0m"
        shown = self.show is None or color in self.show
        worker.relay = threading.Thread(target=self._relay, args=(worker, process.stdout, file, prefix if shown else None), daemon=True)
        worker.relay.start()
        self.workers.append(worker)

    def _relay(self, worker: Worker, pipe: BinaryIO, log: BinaryIO, prefix: str | None) -> None:
        """Copies a worker's output to its log and, line by line under its prefix, to the terminal."""
        with pipe, log:
            for line in iter(pipe.readline, b""):
                with contextlib.suppress(OSError):  # a full disk must not stop the job
                    log.write(line)
                text = line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]  # of a progress bar only the last state
                worker.last_lines.append(text)
                if prefix is not None and not any(noise in text for noise in _NOISE):
                    with self._lock, contextlib.suppress(OSError, ValueError):
                        self.output.write(f"{prefix}{text}\n")
                        self.output.flush()

    def wait(self) -> JobResult:
        """Waits until all have ended, stopping all when one fails. Returns how it went."""
        while True:
            running = self._running()
            failed = [worker for worker in self.workers if worker.process.returncode not in (None, 0)]
            if failed and not self._stopping:
                self._await_other_failures()
                self.stop()
            if not running:
                break
            time.sleep(0.05)
        self._ports.close()
        for worker in self.workers:
            worker.relay.join(timeout=5)
        return self._result()

    def _running(self) -> list[Worker]:
        running = []
        for worker in self.workers:
            if worker.process.poll() is None:
                running.append(worker)
            elif not worker.ended_at:
                worker.ended_at = time.monotonic()
        return running

    def _await_other_failures(self) -> None:
        """The first process to end need not be the cause: give the others a moment to fail by themselves."""
        deadline = time.monotonic() + _SAME_FAILURE_SECONDS
        while self._running() and time.monotonic() < deadline:
            time.sleep(0.05)

    def request_stop(self, number: int = signal.SIGTERM) -> None:
        """Passes a signal on to every worker, for them to save and end."""
        for worker in self.workers:
            if worker.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.process.pid, number)

    def stop(self) -> None:
        """Ends every worker: SIGTERM, then after the grace period SIGKILL."""
        self._stopping = True
        self._running()
        self.request_stop()
        deadline = time.monotonic() + self.grace
        while self._running() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to what is left, with all that it started."""
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.process.pid, signal.SIGKILL)

    def _result(self) -> JobResult:
        codes = {worker.name: worker.process.returncode for worker in self.workers}
        failed = [worker for worker in self.workers if worker.process.returncode != 0]
        if not failed:
            return JobResult(ExitCode.OK, "", codes)
        cause = find_cause(failed)
        sentence = next((line for line in reversed(cause.last_lines) if line.startswith("tfdist: error:")), "")
        return JobResult(exit_code_of(cause), f"{cause.name} {describe_exit(cause.process.returncode)}{': ' + sentence.removeprefix('tfdist: error: ') if sentence else ''}", codes)


def find_cause(failed: Sequence[Worker]) -> Worker:
    """Of the workers that failed, the one that failed by itself and not because a peer was gone."""
    first = min(worker.ended_at for worker in failed)
    together = [worker for worker in failed if worker.ended_at - first <= _SAME_FAILURE_SECONDS + 0.5]
    # A worker that ended "saved, restart me", or was ended by our own SIGTERM, is no cause if another failed.
    return min(together, key=lambda worker: (worker.process.returncode in (ExitCode.PEER_LOST, -signal.SIGTERM, ExitCode.PREEMPTED), worker.ended_at))


def exit_code_of(worker: Worker) -> int:
    """The launcher's exit code for a failed worker: its own; a killed worker counts as a lost peer."""
    return worker.process.returncode if worker.process.returncode > 0 else ExitCode.PEER_LOST


def describe_exit(code: int) -> str:
    """How messages tell a return code of subprocess."""
    if code < 0:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    known = {member.value: member for member in ExitCode}
    return f"ended with exit code {code}" + (f" ({known[code].name}: {MEANING[known[code]]})" if code in known else "")


def worker_environment(rank: int, addresses: Sequence[str], pin: bool, role: str = "worker") -> dict[str, str]:
    """What a worker's environment has more than ours: TF_CONFIG, threads, GPUs."""
    environment = {"TF_GRPC_REUSE_PORT": "true", "PYTHONUNBUFFERED": "1"}
    if len(addresses) > 1 or role == "evaluator":
        environment["TF_CONFIG"] = json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": role, "index": rank}})
    if pin:
        threads = str(max(1, len(os.sched_getaffinity(0)) // len(addresses)))
        environment |= {"OMP_NUM_THREADS": threads, "TF_NUM_INTRAOP_THREADS": threads, "TF_NUM_INTEROP_THREADS": threads}
        gpus = _visible_gpus()
        share = len(gpus) // len(addresses)
        if share and role != "evaluator":
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[rank * share:(rank + 1) * share])
    return environment


def _cores(rank: int, workers: int) -> set[int] | None:
    """The cores of a worker: an equal part; with fewer cores than workers, one of them in turn."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // workers
    return set(cores[rank * share:(rank + 1) * share]) if share else {cores[rank % len(cores)]}


def _visible_gpus() -> list[str]:
    """Indices of the GPUs that may be used; [] if there are none."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu.strip() not in ("", "-1")]
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [str(index) for index, line in enumerate(listing.stdout.splitlines()) if line.startswith("GPU")]
