"""Runs a job's workers on the nodes of a Ray cluster: one actor per worker, which runs it as a process (ray_worker.py).

The launcher handles the actors like its own processes: it fetches their output and exit codes, passes on signals, and
treats an actor that is gone as a lost worker.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tfdist.control.exit_codes import ExitCode
from tfdist.control.tf_config import worker_environment
from tfdist.launcher.job import Job, JobOptions, Relay
from tfdist.launcher.workers import Worker

# Variables of the launcher's environment that workers get, since they concern the run; all others come from the node.
PASSED_ON = ("TFDIST_", "TF_", "KERAS_", "OMP_", "XLA_", "NCCL_", "OTEL_", "MLFLOW_", "WANDB_")
_UNREACHABLE_SECONDS = 30.0  # after which an actor that Ray calls temporarily unreachable counts as lost
_ANSWER_SECONDS = 5.0  # for an actor to answer after its worker was to be killed; then the actor is ended


class Outcome(NamedTuple):
    """How and when a worker ended."""

    code: int
    at: float  # monotonic seconds


@dataclass
class ActorWorker(Worker):
    """A worker whose process is controlled by an actor."""

    actor: Any = field(kw_only=True)
    host: str = field(kw_only=True)
    returncode: int | None = None
    outcome: Outcome | None = None  # set by the thread that attends to the worker
    signals: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)  # to be passed on

    @property
    def code(self) -> int | None:
        return self.returncode

    def signal(self, number: int) -> None:
        """Queues the signal, since Ray must not be called in a signal handler."""
        self.signals.put(number)


class RayJob(Job[ActorWorker]):
    """Starts workers on a Ray cluster, relays their output, and stops all when one fails.

    Args:
      arguments: command-line arguments of Python on each worker's node.
      places: a Ray scheduling strategy for each worker.
      cpus: of each worker; with `pin` it gets as many threads.
      timeout: seconds that Ray may take to start the actors.
      options: fields of JobOptions.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        places: Sequence,
        log_dir: Path,
        *,
        cpus: int,
        timeout: float,
        **options: Any,
    ):
        super().__init__(len(places), log_dir, JobOptions(**options))
        self.environment = {
            name: value
            for name, value in self.environment.items()
            if name.startswith(PASSED_ON) or name in ("PYTHONPATH", "NO_COLOR")
        }
        self.arguments, self.places, self.cpus, self.timeout = list(arguments), list(places), cpus, timeout

    def start(self) -> None:
        """Starts all workers. One whose actor cannot be started counts as lost. Raises ConfigError (log folder)."""
        actors = self._start_actors()
        addresses, workers = self._meet(actors)
        if self._kill_at is not None:  # asked to stop while starting
            self._end(actors)
            return
        try:
            logs = [self.open_log(worker.name, ["python", *self.arguments]) for worker in workers]
        except BaseException:
            self._end(actors)
            raise
        for worker, log in zip(workers, logs, strict=True):
            worker.relay = threading.Thread(
                target=self._attend, args=(worker, log, addresses), name=f"tfdist-relay-{worker.name}", daemon=True
            )
            worker.relay.start()
            self.workers.append(worker)
            if self._kill_at is not None:  # asked to stop in the meantime
                worker.signal(signal.SIGTERM)

    def _start_actors(self) -> list:
        import ray

        from tfdist.launcher.ray_worker import RayWorker

        kind = ray.remote(RayWorker)
        return [
            kind.options(
                num_cpus=self.cpus, num_gpus=self.options.gpus_per_worker, scheduling_strategy=place, max_restarts=0
            ).remote()
            for place in self.places
        ]

    def _meet(self, actors: list) -> tuple[list[str], list[ActorWorker]]:
        """Returns the address of each worker ("" if it is lost), and the workers; those on one node have consecutive
        ranks."""
        import ray
        from ray.exceptions import RayError

        calls, addresses = [actor.address.remote() for actor in actors], []
        deadline = time.monotonic() + self.timeout
        for call in calls:
            while not ray.wait([call], timeout=0.5)[0] and time.monotonic() < deadline and self._kill_at is None:
                pass
            try:
                addresses.append(ray.get(call, timeout=0))
            except RayError:  # also if it did not answer in time
                addresses.append("")
        order = sorted(range(len(actors)), key=lambda index: (addresses[index].rpartition(":")[0], index))
        addresses = [addresses[index] for index in order]
        workers = [
            ActorWorker(
                f"worker {rank}",
                rank,
                shown=self.options.show is None or rank in self.options.show,
                actor=actors[index],
                host=addresses[rank].rpartition(":")[0],
            )
            for rank, index in enumerate(order)
        ]
        return addresses, workers

    def _attend(self, worker: ActorWorker, log: BinaryIO, addresses: list[str]) -> None:
        """Handles a worker until its end. Starts it first, if all workers have an address."""
        from ray.exceptions import RayError

        relay = Relay(self, worker, log)
        try:
            if all(addresses):
                code = self._run(worker, relay, addresses)
            else:
                code, worker.lost = -signal.SIGTERM, "" if worker.host else "could not be started by Ray"
        except RayError:
            worker.lost = f"was lost: Ray reports that its node ({worker.host}) or its actor is gone"
            code = ExitCode.PEER_LOST
        if worker.lost:
            code = ExitCode.PEER_LOST
        worker.killed |= self._kill_at == 0 and (bool(worker.lost) or code == -signal.SIGKILL)
        relay.feed(b"")
        worker.outcome = Outcome(int(code), time.monotonic())

    def _run(self, worker: ActorWorker, relay: Relay, addresses: list[str]) -> int:
        """Runs a worker and returns its exit code. Raises RayError if its actor is gone."""
        environment = {
            **self.environment,
            **worker_environment(addresses, worker.rank, self.cpus if self.options.pin else 0, self.environment),
        }
        if not self.options.gpus_per_worker:  # otherwise Ray has chosen the GPUs
            environment["CUDA_VISIBLE_DEVICES"] = "-1"
        problem = self._answer(worker, lambda: worker.actor.start.remote(self.arguments, environment, os.getcwd()))
        if problem:
            worker.error = f"it cannot be started on {worker.host} ({problem})"
            return ExitCode.STARTUP
        received, sent, code = 0, 0, None
        while code is None:
            signals = [worker.signals.get() for _ in range(worker.signals.qsize())]
            data, code = self._answer(
                worker,
                lambda at=(received, signals, sent): worker.actor.exchange.remote(*at),
            )
            sent += len(signals)
            received += len(data)
            if data:
                relay.feed(data)
        return code

    def _answer(self, worker: ActorWorker, call: Callable[[], Any]) -> Any:
        """Returns an actor's answer to a call.

        Repeats the call while Ray says that the actor is temporarily unreachable. Raises RayError if it is gone.
        """
        import ray
        from ray.exceptions import ActorUnavailableError

        given_up = time.monotonic() + _UNREACHABLE_SECONDS
        killed_at = None
        reference = call()
        while True:
            if ray.wait([reference], timeout=0.5)[0]:
                try:
                    return ray.get(reference)
                except ActorUnavailableError:
                    if time.monotonic() > given_up:
                        raise
                    time.sleep(0.5)
                    reference = call()
            if self._kill_at == 0:
                killed_at = killed_at or time.monotonic()
                if time.monotonic() - killed_at > _ANSWER_SECONDS:
                    ray.kill(worker.actor)

    def _notice_end(self, worker: ActorWorker) -> None:
        if worker.code is None and not worker.relay.is_alive():
            worker.returncode, worker.ended_at = worker.outcome or Outcome(ExitCode.INTERNAL, time.monotonic())

    def _release(self) -> None:
        self._end([worker.actor for worker in self.workers])

    def _end(self, actors: list) -> None:
        """Ends actors, and with them the processes that they started."""
        import ray

        for actor in actors:
            ray.kill(actor)
