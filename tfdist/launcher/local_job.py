"""Runs N workers on this machine as one job: ports, environment, output, logs, first failure, no orphans.

With parameter servers, the job consists of a chief, the workers and the servers, with ranks in this order. A worker
that dies is then restarted alone (worker_restarts.py); the death of the chief or a server stops the job.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tfdist.control import token
from tfdist.control.exit_codes import ConfigError, StartupError, TfdistError
from tfdist.control.machine_shares import divide_cores, divide_gpus, visible_gpus
from tfdist.control.preflight import PortReservation
from tfdist.control.processes import Standbys, is_stopped, output_of, spawn
from tfdist.control.tf_config import local_tasks, worker_environment
from tfdist.launcher.job import Job, JobOptions, Relay
from tfdist.launcher.worker_restarts import WorkerRestarts
from tfdist.launcher.workers import LocalWorker, describe

_MOST_PROCESSES = 1024  # a larger number is a typing error
_CHIEF_GONE_SECONDS = 10.0  # workers and parameter servers end by themselves when their chief is gone


class ProcessEnvironment(NamedTuple):
    """Environment and cores of a process to be started."""

    environment: dict[str, str]
    cores: set[int] | None  # None: all


class LocalJob(Job[LocalWorker]):
    """Starts workers, relays their output, and stops all when one fails. A failing evaluator stops nobody.

    Call `start` in a thread that lives as long as the job: the kernel ends the workers when that thread ends.

    Args:
      command: command line of each worker; `evaluator`: that of the evaluator, if there is one.
      log_dir: folder of the files worker-K.log, which are appended to.
      servers: number of parameter servers; if there are any, a chief precedes the workers.
      standbys: spare processes that become workers, where available.
      left_out: workers of the whole job that this one does without, by rank: their GPUs are not used.
      options: fields of JobOptions.
    """

    _ports: PortReservation  # set by `start`

    def __init__(
        self,
        command: Sequence[str],
        workers: int,
        log_dir: Path,
        *,
        evaluator: Sequence[str] | None = None,
        servers: int = 0,
        standbys: Standbys | None = None,
        left_out: Sequence[int] = (),
        **options: Any,
    ):
        if workers + servers > _MOST_PROCESSES:
            asked = f"--workers={workers}" + (f" and --ps={servers}" if servers else "")
            raise ConfigError(f"{asked}: one machine takes at most {_MOST_PROCESSES} processes; use a smaller number.")
        self.tasks = local_tasks(workers + 1 + servers if servers else workers, servers)
        super().__init__(len(self.tasks), log_dir, JobOptions(**options))
        self.command, self.evaluator, self.servers, self._trainer_count = list(command), evaluator, servers, workers
        self.started_at_once, self.standbys, self._left_out = self.count, standbys, left_out
        self._restarts = WorkerRestarts() if servers else None

    def start(self) -> None:
        """Starts all workers, or none.

        Raises ConfigError (log folder, GPUs) or StartupError (a process cannot be started).
        """
        gpus, warning = self._divide_gpus()
        if warning:
            self.say(f"tfdist: warning: {warning}")
        try:
            self._ports = PortReservation(self.count)
        except OSError as error:
            raise ConfigError(
                f"--workers={self._trainer_count} needs a port for each of {self.count} processes ({error.strerror}):"
                " use fewer."
            ) from None
        try:
            for rank in range(self.started_at_once):
                self._spawn(self._name(rank), rank, self.command, gpus[rank])
            if self.evaluator:
                self._spawn("evaluator", None, self.evaluator, gpus[self.count])
        except BaseException:
            self.kill()
            self._ports.close()
            raise
        for worker in self.workers:  # not earlier: forking is safest while there is only one thread
            worker.relay.start()

    @cached_property
    def _cores(self) -> list[set[int]]:
        """The cores of each rank; empty if they are not divided."""
        return divide_cores(self.count) if self.options.pin else []

    def _name(self, rank: int) -> str:
        task = self.tasks[rank]
        return task.role if task.role == "chief" else f"{task.role} {task.index}"

    def _divide_gpus(self) -> tuple[list[dict[str, str]], str]:
        """Returns the GPUs of each rank and, last, of the evaluator; and a warning, or "".

        Always the same in one job. The chief and the parameter servers of a job with servers get none.
        """
        visible, each, left_out = visible_gpus(self.environment), self.options.gpus_per_worker, self._left_out
        if len(visible) < (self._trainer_count + len(left_out)) * (each or 1):
            left_out = ()  # no worker has a GPU of its own
        gpus, warning = divide_gpus(visible, self._trainer_count + len(left_out), each)
        gpus = [shares for rank, shares in enumerate(gpus) if rank not in left_out]
        if self.servers:
            gpus = [
                {"CUDA_VISIBLE_DEVICES": "-1"},
                *gpus[:-1],
                *[{"CUDA_VISIBLE_DEVICES": "-1"}] * self.servers,
                gpus[-1],
            ]
        return gpus, warning

    def _start_another(self, rank: int) -> bool:
        """Starts a process in place of one that has ended, as the last of `workers`. Returns False if it cannot be
        started (which must not end the others), or if the job was asked to stop."""
        before = len(self.workers)
        try:
            self._spawn(self._name(rank), rank, self.command, self._divide_gpus()[0][rank])
        except TfdistError as error:
            self.say(f"tfdist: {error}")
        if len(self.workers) == before:
            return False
        self.workers[-1].relay.start()
        return True

    def _restart_worker(self, worker: LocalWorker) -> bool:
        """Restarts a dead worker of a job with parameter servers, in its place. Returns whether it did."""
        self.say(f"tfdist: {describe(worker)}; it is restarted")
        started = self._start_another(worker.slot)
        if started:
            self.workers[worker.slot] = self.workers.pop()
        return started

    def _spawn(self, name: str, rank: int | None, command: Sequence[str], gpus: dict[str, str]) -> None:
        if self._kill_at is not None:  # asked to stop while starting
            return
        started_in = self._process_environment(rank, gpus)
        log = self.open_log(name, command)
        process = None
        if self.standbys and rank is not None:
            process = self.standbys.take(rank, self.count, started_in.environment, command)
        try:
            process = process or spawn(command, started_in.environment, started_in.cores)
        except (OSError, subprocess.SubprocessError) as error:
            log.close()
            raise StartupError(
                f"{name} cannot be started ({error}): check that {command[0]} can be run, and this machine's limits on"
                " processes."
            ) from None
        show = self.options.show
        worker = LocalWorker(name, rank, shown=rank is None or show is None or rank in show, process=process)
        worker.relay = threading.Thread(
            target=self._relay, args=(worker, log), name=f"tfdist-relay-{name}", daemon=True
        )
        self.workers.append(worker)
        if self._kill_at is not None:  # asked to stop during the spawn
            worker.signal(signal.SIGTERM)

    def _process_environment(self, rank: int | None, gpus: dict[str, str]) -> ProcessEnvironment:
        """Returns the environment and cores of a worker's process, or (rank None) of the evaluator's."""
        cores = self._cores
        threads = len(cores[rank or 0]) if cores else 0  # the evaluator gets the same number, but no cores of its own
        environment = {
            **self.environment,
            **worker_environment(self._ports.addresses, rank, threads, self.environment, self.servers),
            **gpus,
        }
        if rank is None:  # the evaluator connects to no other process
            environment.pop(token.VARIABLE, None)
        return ProcessEnvironment(environment, cores[rank] if cores and rank is not None else None)

    def start_standbys(self) -> None:
        """Starts a spare process for every rank, for a later job of the same size."""
        if self.standbys is None:
            return
        gpus, _ = self._divide_gpus()
        for rank in range(self.count):
            self.standbys.start(rank, self.count, *self._process_environment(rank, gpus[rank]), self.command)

    def _relay(self, worker: LocalWorker, log: BinaryIO) -> None:
        relay = Relay(self, worker, log)
        with output_of(worker.process) as pipe:
            data = None
            while data != b"":
                data = pipe.read1(65536)
                relay.feed(data)

    def _notice_end(self, worker: LocalWorker) -> None:
        if worker.code is None and os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            worker.signal(signal.SIGKILL)  # its child processes; must come before its process id can be reused
            worker.process.wait()
            worker.ended_at = time.monotonic()
            worker.killed |= self._kill_at == 0 and worker.code == -signal.SIGKILL
            worker.relay.join(timeout=2)  # for its last lines; a process that left its session may keep the pipe open
            if worker.rank is None and worker.code and self._kill_at is None:
                self.say(f"tfdist: {describe(worker)}; training continues")

    def _handle_ends(self, now: float) -> None:
        """In a job with parameter servers, restarts dead workers, and ends all processes when the chief is gone."""
        if not self._restarts or self._kill_at is not None:
            return
        chief = self.workers[0]
        if chief.code is None:
            for worker in list(self.workers):
                if not worker.name.startswith("worker") or not self._restarts.due(worker.name, worker.code):
                    continue
                if not self._restart_worker(worker):
                    self._restarts.not_started(worker.name)
        elif now - chief.ended_at > _CHIEF_GONE_SECONDS:
            self._request_stop(self.options.grace)  # a worker that is still starting would wait for a chief

    def _is_tolerated(self, worker: LocalWorker) -> bool:
        return bool(self._restarts and self._restarts.is_pending(worker.name)) and self.workers[0].code is None

    def _is_finished(self) -> bool:
        """Returns whether the chief of a job with parameter servers has succeeded. Processes that it no longer needs
        may then end in any way."""
        return bool(self.servers and self.workers) and self.workers[0].code == 0

    def _release(self) -> None:
        self._ports.close()

    def _stop_after_failure(self) -> None:
        super()._stop_after_failure()
        for worker in self.workers:
            if worker.code is None and is_stopped(worker.process.pid):  # a stopped process reacts to no other signal
                worker.signal(signal.SIGKILL)
                worker.killed = True
