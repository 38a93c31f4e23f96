"""N workers on this machine as one job: ports, environment, output, logs, first failure, no orphans.

With parameter servers the job is a chief, the workers and the servers, ranks in this order; a worker that dies is
started again alone (comeback.py), the others stop the job like any worker.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TextIO

from tfdist.control.cluster import divide_cores, divide_gpus, local_tasks, visible_gpus, worker_environment
from tfdist.control.comeback import Comebacks
from tfdist.control.exit_codes import ConfigError, ExitCode, StartupError
from tfdist.control.preflight import PortReservation
from tfdist.control.processes import Standbys, is_stopped, spawn
from tfdist.control.terminal import LineReader
from tfdist.control.workers import JobResult, Worker, describe, guilt

_COLORS = (36, 33, 35, 32, 34, 31)
# When one worker dies the others fail too. How long (in seconds) they may end by themselves, with a clearer message
# than ours, before they are asked to: once the cause is known, and while all that ended merely lost a peer.
_CAUSE_KNOWN_SECONDS = 1.0
_CAUSE_UNKNOWN_SECONDS = 3.0
_FAILURE_GRACE_SECONDS = 10.0  # after a failure nothing new can be saved: what is being written may be finished
_CHIEF_GONE_SECONDS = 10.0  # workers and parameter servers end by themselves when their chief is gone
_ERROR = "tfdist: error: "  # how a command begins the sentence that names its error
# What TensorFlow's C++ says at every import whatever its log level. Kept in the log files, not shown.
_NOISE = ("WARNING: All log messages before absl::InitializeLog()", "oneDNN custom operations are on.")


class LocalJob:
    """Starts workers, relays their output, stops all when one fails. An evaluator that fails stops nobody.

    Call `start` in a thread that lives as long as the job: the kernel ends the workers when that thread ends.

    Args:
      command: what each worker runs; `evaluator`: what an evaluator beside them runs, if there is to be one.
      log_dir: where worker-K.log are written (appended to).
      show: ranks whose output is shown; None for all. The evaluator's always is.
      pin: give each worker cores of its own and as many threads; `gpus_per_worker`: 0 for an equal part of those there are.
      servers: parameter servers; with any, a chief comes before the workers.
      standbys: spare processes that take the workers' places where there are any.
      grace: seconds between asking a worker to end (SIGTERM) and making it (SIGKILL).
      environment, output: in place of this process's own, and of standard output.
    """

    def __init__(self, command: Sequence[str], workers: int, log_dir: Path, *, evaluator: Sequence[str] | None = None, show: set[int] | None = None,
                 pin: bool = True, gpus_per_worker: int = 0, grace: float = 10.0, standbys: Standbys | None = None, servers: int = 0,
                 environment: Mapping[str, str] | None = None, output: TextIO | None = None):
        self.command, self.log_dir, self.evaluator, self.servers = list(command), log_dir, evaluator, servers
        self.tasks = local_tasks(workers + 1 + servers if servers else workers, servers)
        self.count, self._trainer_count = len(self.tasks), workers
        self.started_at_once = self.count
        self._comebacks = Comebacks() if servers else None
        self.show, self.pin, self.gpus_per_worker, self.grace, self.standbys = show, pin, gpus_per_worker, grace, standbys
        self.environment = {name: value for name, value in (os.environ if environment is None else environment).items() if name != "TF_CONFIG"}
        self.output = output or sys.stdout
        self.workers: list[Worker] = []
        self._ports: PortReservation | None = None
        self._lock = threading.Lock()
        self._kill_at: float | None = None  # set: the workers have been asked to end; 0: they are being killed

    def start(self) -> None:
        """Starts all workers, or none. Raises ConfigError (log folder, GPUs) or StartupError (a process cannot be started)."""
        gpus, warning = self._divide_gpus()
        if warning:
            self._say(f"tfdist: warning: {warning}")
        cores = divide_cores(self.count) if self.pin else []
        self._ports = PortReservation(self.count)
        try:
            for rank in range(self.started_at_once):
                self._spawn(self._name(rank), rank, self.command, gpus[rank], cores)
            if self.evaluator:
                self._spawn("evaluator", None, self.evaluator, gpus[self.count], cores)
        except BaseException:
            self.kill()
            self._ports.close()
            raise
        for worker in self.workers:  # only now: forking is safest while there is one thread
            worker.relay.start()

    def _name(self, rank: int) -> str:
        role, index = self.tasks[rank]
        return role if role == "chief" else f"{role} {index}"

    def _divide_gpus(self) -> tuple[list[dict[str, str]], str]:
        """Of each rank, then of the evaluator. A chief and parameter servers have none."""
        gpus, warning = divide_gpus(visible_gpus(self.environment), self._trainer_count, self.gpus_per_worker)
        if self.servers:
            gpus = [{"CUDA_VISIBLE_DEVICES": "-1"}, *gpus[:-1], *[{"CUDA_VISIBLE_DEVICES": "-1"}] * self.servers, gpus[-1]]
        return gpus, warning

    def _bring_back(self, worker: Worker) -> None:
        """Starts a dead worker of a job with parameter servers again, in its place."""
        self._say(f"tfdist: {describe(worker)}; it is started again")
        cores = divide_cores(self.count) if self.pin else []
        self._spawn(worker.name, worker.rank, self.command, self._divide_gpus()[0][worker.rank], cores)
        self.workers[worker.rank] = self.workers.pop()
        self.workers[worker.rank].relay.start()

    def _spawn(self, name: str, rank: int | None, command: Sequence[str], gpus: dict[str, str], cores: list[set[int]]) -> None:
        if self._kill_at is not None:  # asked to stop while starting
            return
        environment, affinity = self._surroundings(rank, gpus, cores)
        log = self._open_log(name, command)
        process = self.standbys.take(rank, self.count, environment, command) if self.standbys and rank is not None else None
        try:
            process = process or spawn(command, environment, affinity)
        except (OSError, subprocess.SubprocessError) as error:
            log.close()
            raise StartupError(f"{name} cannot be started ({error}): check that {command[0]} can be run, and the limits of this machine on processes.") from None
        worker = Worker(name, rank, process, shown=rank is None or self.show is None or rank in self.show)
        worker.relay = threading.Thread(target=self._relay, args=(worker, log), name=f"tfdist-relay-{name}", daemon=True)
        self.workers.append(worker)
        if self._kill_at is not None:  # asked to stop in this very moment
            worker.signal(signal.SIGTERM)

    def _surroundings(self, rank: int | None, gpus: dict[str, str], cores: list[set[int]]) -> tuple[dict[str, str], set[int] | None]:
        """The environment and the cores of a worker."""
        threads = len(cores[rank or 0]) if cores else 0  # the evaluator takes as many, but no cores of its own
        environment = {**self.environment, **worker_environment(self._ports.addresses, rank, threads, self.environment, self.servers), **gpus}
        return environment, cores[rank] if cores and rank is not None else None

    def start_standbys(self) -> None:
        """Starts a spare process for every rank, for a job of the same size that comes after this one."""
        gpus, _ = self._divide_gpus()
        cores = divide_cores(self.count) if self.pin else []
        for rank in range(self.count):
            self.standbys.start(rank, self.count, *self._surroundings(rank, gpus[rank], cores), self.command)

    def _open_log(self, name: str, command: Sequence[str]) -> BinaryIO:
        path = self.log_dir / f"{name.replace(' ', '-')}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            log = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by the relay
            log.write(f"\n===== {time.strftime('%Y-%m-%d %H:%M:%S')} {shlex.join(command)}\n".encode())
            return log
        except OSError as error:
            raise ConfigError(f"The log {path} cannot be written ({error.strerror}): choose another --run_dir.") from None

    def _relay(self, worker: Worker, log: BinaryIO) -> None:
        """Copies a worker's output to its log and, line by line under its name, to the terminal."""
        reader, prefix = LineReader(), f"[{worker.name}] "
        color = self.output.isatty() and "NO_COLOR" not in self.environment
        if color:
            prefix = f"\x1b[{_COLORS[(self.count if worker.rank is None else worker.rank) % len(_COLORS)]}m{prefix}\x1b[0m"
        with worker.process.stdout as pipe, log:
            data = None
            while data != b"":
                data = pipe.read1(65536)
                with contextlib.suppress(OSError):  # a full disk must not stop the job
                    log.write(data)
                for text in [line for line in reader.feed(data, final=not data) if not any(noise in line for noise in _NOISE)]:
                    worker.last_lines.append(text)
                    if text.startswith(_ERROR):
                        worker.error = text.removeprefix(_ERROR)
                    if worker.shown:
                        self._say(f"{prefix}{text}" + ("\x1b[0m" if color and "\x1b" in text else ""))

    def _say(self, line: str) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            self.output.write(line + "\n")
            self.output.flush()

    def poll(self) -> JobResult | None:
        """One look, without waiting: stops all if one has failed. None while any process runs, then how it went."""
        for worker in self.workers:
            self._notice_end(worker)
        if self._comebacks and self._kill_at is None and self.workers[0].code is None:
            for worker in [worker for worker in self.workers if worker.name.startswith("worker") and self._comebacks.due(worker.name, worker.code)]:
                self._bring_back(worker)
        trainers = [worker for worker in self.workers if worker.rank is not None]
        failed = [worker for worker in trainers if worker.code and not (self._comebacks and self._comebacks.waits(worker.name) and self.workers[0].code is None)]
        now = time.monotonic()
        if failed and self._kill_at is None:
            known = any(guilt(worker) == 0 for worker in failed)
            # Where one saved on request (42) the others are saving as well, and a second SIGTERM would cut that short.
            saving = all(worker.code == ExitCode.PREEMPTED for worker in failed)
            patience = self.grace if saving else _CAUSE_KNOWN_SECONDS if known else _CAUSE_UNKNOWN_SECONDS
            if now - min(worker.ended_at for worker in failed) > patience or all(worker.code is not None for worker in trainers):
                self._stop_after_failure()
        if self.servers and self._kill_at is None and self.workers[0].code is not None and now - self.workers[0].ended_at > _CHIEF_GONE_SECONDS:
            self.request_stop()  # a worker that is only starting would wait for a chief
        if self._kill_at is not None and now > self._kill_at:
            self.kill()
        if any(worker.code is None for worker in self.workers):
            return None
        self._ports.close()
        return self._result()

    def _notice_end(self, worker: Worker) -> None:
        if worker.code is None and os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            worker.signal(signal.SIGKILL)  # what it leaves behind; before its number can be given to another process
            worker.process.wait()
            worker.ended_at = time.monotonic()
            worker.killed |= self._kill_at == 0 and worker.code == -signal.SIGKILL
            worker.relay.join(timeout=2)  # its last lines; a process that left its session may hold the pipe open
            if worker.rank is None and worker.code and self._kill_at is None:
                self._say(f"tfdist: {describe(worker)}; training goes on")

    def wait(self) -> JobResult:
        """Waits until all have ended, stopping all when one fails. Returns how it went."""
        try:
            while (result := self.poll()) is None:
                time.sleep(0.05)
            return result
        except BaseException:
            self.kill()
            raise

    def request_stop(self) -> None:
        """Asks every worker to save and end (SIGTERM); `poll` and `wait` kill those that have not within the grace period."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self.grace
            self.forward(signal.SIGTERM)

    def _stop_after_failure(self) -> None:
        self.request_stop()
        self._kill_at = min(self._kill_at, time.monotonic() + _FAILURE_GRACE_SECONDS)
        for worker in self.workers:
            if worker.code is None and is_stopped(worker.process.pid):  # it will not hear any other signal
                worker.signal(signal.SIGKILL)
                worker.killed = True

    def forward(self, number: int) -> None:
        """Passes a signal on to every worker."""
        for worker in self.workers:
            if worker.code is None:
                worker.signal(number)

    def stop(self) -> JobResult:
        """Ends every worker: SIGTERM, then after the grace period SIGKILL."""
        self.request_stop()
        return self.wait()

    def kill(self) -> None:
        """SIGKILL to what is left, with all that it started. `wait` then returns at once."""
        self._kill_at = 0.0
        self.forward(signal.SIGKILL)

    def resize(self, workers: int) -> bool:
        """Whether the job goes on with another number of workers, without a restart: this one cannot (ElasticJob can)."""
        return False

    def _all_started(self) -> bool:
        return len(self.workers) >= self.count

    def _result(self) -> JobResult:
        codes = {worker.name: worker.code for worker in self.workers}
        # An evaluator that was stopped with the workers is no failure.
        finished = self.servers and self.workers and self.workers[0].code == 0  # whatever became of those that it no longer needed
        failed = [] if finished else [worker for worker in self.workers if worker.code and (worker.rank is not None or self._kill_at is None)]
        if not failed:
            return JobResult(ExitCode.OK, "", codes) if self._all_started() else JobResult(ExitCode.PREEMPTED, "the job was asked to stop before all workers were started", codes)
        cause = min(failed, key=lambda worker: (guilt(worker), worker.ended_at))
        return JobResult(cause.code if cause.code > 0 else ExitCode.PEER_LOST, describe(cause), codes, () if cause.shown else tuple(cause.last_lines), cause.rank)
