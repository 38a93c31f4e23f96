"""N workers on this machine as one job: ports, environment, output, logs, first failure, no orphans.

With parameter servers the job is a chief, the workers and the servers, ranks in this order; a worker that dies is
started again alone (worker_restarts.py), the others stop the job like any worker.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TextIO

from tfdist.control import token
from tfdist.control.cluster import divide_cores, divide_gpus, local_tasks, visible_gpus, worker_environment
from tfdist.control.exit_codes import StartupError
from tfdist.control.job import Job, Relay
from tfdist.control.preflight import PortReservation
from tfdist.control.processes import Standbys, is_stopped, spawn
from tfdist.control.worker_restarts import Comebacks
from tfdist.control.workers import Worker, describe

_CHIEF_GONE_SECONDS = 10.0  # workers and parameter servers end by themselves when their chief is gone


class LocalJob(Job):
    """Starts workers, relays their output, stops all when one fails. An evaluator that fails stops nobody.

    Call `start` in a thread that lives as long as the job: the kernel ends the workers when that thread ends.

    Args:
      command: what each worker runs; `evaluator`: what an evaluator beside them runs, if there is to be one.
      log_dir: where worker-K.log are written (appended to).
      show: ranks whose output is shown; None for all. The evaluator's always is.
      pin: give each worker cores of its own and as many threads; `gpus_per_worker`: 0 for an equal part of those there
      are.
      servers: parameter servers; with any, a chief comes before the workers.
      standbys: spare processes that take the workers' places where there are any.
      grace: seconds between asking a worker to end (SIGTERM) and making it (SIGKILL).
      environment, output: in place of this process's own, and of standard output.
    """

    def __init__(
        self,
        command: Sequence[str],
        workers: int,
        log_dir: Path,
        *,
        evaluator: Sequence[str] | None = None,
        show: set[int] | None = None,
        pin: bool = True,
        gpus_per_worker: int = 0,
        grace: float = 10.0,
        standbys: Standbys | None = None,
        servers: int = 0,
        environment: Mapping[str, str] | None = None,
        output: TextIO | None = None,
    ):
        self.tasks = local_tasks(workers + 1 + servers if servers else workers, servers)
        super().__init__(len(self.tasks), log_dir, show, grace, environment, output)
        self.command, self.evaluator, self.servers, self._trainer_count = list(command), evaluator, servers, workers
        self.started_at_once = self.count
        self._comebacks = Comebacks() if servers else None
        self.pin, self.gpus_per_worker, self.standbys = pin, gpus_per_worker, standbys
        self._ports: PortReservation | None = None

    def start(self) -> None:
        """Starts all workers, or none.

        Raises ConfigError (log folder, GPUs) or StartupError (a process cannot be started).
        """
        gpus, warning = self._divide_gpus()
        if warning:
            self.say(f"tfdist: warning: {warning}")
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
            gpus = [
                {"CUDA_VISIBLE_DEVICES": "-1"},
                *gpus[:-1],
                *[{"CUDA_VISIBLE_DEVICES": "-1"}] * self.servers,
                gpus[-1],
            ]
        return gpus, warning

    def _bring_back(self, worker: Worker) -> None:
        """Starts a dead worker of a job with parameter servers again, in its place."""
        self.say(f"tfdist: {describe(worker)}; it is started again")
        cores = divide_cores(self.count) if self.pin else []
        self._spawn(worker.name, worker.rank, self.command, self._divide_gpus()[0][worker.rank], cores)
        self.workers[worker.rank] = self.workers.pop()
        self.workers[worker.rank].relay.start()

    def _spawn(
        self, name: str, rank: int | None, command: Sequence[str], gpus: dict[str, str], cores: list[set[int]]
    ) -> None:
        if self._kill_at is not None:  # asked to stop while starting
            return
        environment, affinity = self._surroundings(rank, gpus, cores)
        log = self.open_log(name, command)
        process = (
            self.standbys.take(rank, self.count, environment, command) if self.standbys and rank is not None else None
        )
        try:
            process = process or spawn(command, environment, affinity)
        except (OSError, subprocess.SubprocessError) as error:
            log.close()
            raise StartupError(
                f"{name} cannot be started ({error}): check that {command[0]} can be run, and the limits of this"
                " machine on processes."
            ) from None
        worker = Worker(name, rank, process, shown=rank is None or self.show is None or rank in self.show)
        worker.relay = threading.Thread(
            target=self._relay, args=(worker, log), name=f"tfdist-relay-{name}", daemon=True
        )
        self.workers.append(worker)
        if self._kill_at is not None:  # asked to stop in this very moment
            worker.signal(signal.SIGTERM)

    def _surroundings(
        self, rank: int | None, gpus: dict[str, str], cores: list[set[int]]
    ) -> tuple[dict[str, str], set[int] | None]:
        """The environment and the cores of a worker."""
        threads = len(cores[rank or 0]) if cores else 0  # the evaluator takes as many, but no cores of its own
        environment = {
            **self.environment,
            **worker_environment(self._ports.addresses, rank, threads, self.environment, self.servers),
            **gpus,
        }
        if rank is None:  # the evaluator talks to nobody
            environment.pop(token.VARIABLE, None)
        return environment, cores[rank] if cores and rank is not None else None

    def start_standbys(self) -> None:
        """Starts a spare process for every rank, for a job of the same size that comes after this one."""
        gpus, _ = self._divide_gpus()
        cores = divide_cores(self.count) if self.pin else []
        for rank in range(self.count):
            self.standbys.start(rank, self.count, *self._surroundings(rank, gpus[rank], cores), self.command)

    def _relay(self, worker: Worker, log: BinaryIO) -> None:
        relay = Relay(self, worker, log)
        with worker.process.stdout as pipe:
            data = None
            while data != b"":
                data = pipe.read1(65536)
                relay.feed(data)

    def _notice_end(self, worker: Worker) -> None:
        if worker.code is None and os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            worker.signal(signal.SIGKILL)  # what it leaves behind; before its number can be given to another process
            worker.process.wait()
            worker.ended_at = time.monotonic()
            worker.killed |= self._kill_at == 0 and worker.code == -signal.SIGKILL
            worker.relay.join(timeout=2)  # its last lines; a process that left its session may hold the pipe open
            if worker.rank is None and worker.code and self._kill_at is None:
                self.say(f"tfdist: {describe(worker)}; training goes on")

    def _tend(self, now: float) -> None:
        """Of a job with parameter servers: brings dead workers back, ends all when the chief is gone."""
        if not self._comebacks or self._kill_at is not None:
            return
        chief = self.workers[0]
        if chief.code is None:
            for worker in [
                worker
                for worker in self.workers
                if worker.name.startswith("worker") and self._comebacks.due(worker.name, worker.code)
            ]:
                self._bring_back(worker)
        elif now - chief.ended_at > _CHIEF_GONE_SECONDS:
            self._stop()  # a worker that is only starting would wait for a chief

    def _is_borne(self, worker: Worker) -> bool:
        return bool(self._comebacks) and self._comebacks.waits(worker.name) and self.workers[0].code is None

    def _is_finished(self) -> bool:
        """With parameter servers, the chief's word counts: what becomes of those that it no longer needs is no
        failure.
        """
        return bool(self.servers and self.workers) and self.workers[0].code == 0

    def _release(self) -> None:
        self._ports.close()

    def _stop_after_failure(self) -> None:
        super()._stop_after_failure()
        for worker in self.workers:
            if worker.code is None and is_stopped(worker.process.pid):  # it will not hear any other signal
                worker.signal(signal.SIGKILL)
                worker.killed = True
