"""The common part of jobs of several processes, wherever they run: output, logs, the first failure, the end.

LocalJob (local_job.py) runs them on this machine, RayJob (ray_job.py) on the nodes of a Ray cluster.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Generic, TextIO, TypeVar

from tfdist.control import token
from tfdist.control.exit_codes import ConfigError, ExitCode
from tfdist.control.own_files import appended_to
from tfdist.control.terminal import LineReader
from tfdist.control.workers import JobResult, Worker, describe, root_cause_order

_COLORS = (36, 33, 35, 32, 34, 31)
# When one worker dies the others fail too. How long (in seconds) they may end by themselves, with a clearer message
# than ours, before they are asked to: once the cause is known, and while all that ended merely lost a peer.
_CAUSE_KNOWN_SECONDS = 1.0
_CAUSE_UNKNOWN_SECONDS = 3.0
_FAILURE_GRACE_SECONDS = 10.0  # after a failure nothing new can be saved: what is being written may be finished
_ERROR = "tfdist: error: "  # how a command begins the sentence that names its error
# What TensorFlow's C++ says at every start, whatever its log level, about logging itself and about processors and GPUs
# that are not there. Kept in the log files, not shown.
_NOISE = (
    "WARNING: All log messages before absl::InitializeLog()",
    "oneDNN custom operations are on.",
    "cpu_feature_guard.cc:",
    "To enable the following instructions:",
    "cudart_stub.cc:",
    "cuda_platform.cc:",
    "cuda_executor.cc:",
    "computation_placer.cc:",
    "Unable to register cuDNN factory",
    "Unable to register cuBLAS factory",
    "Unable to register cuFFT factory",
)


_Worker = TypeVar("_Worker", bound=Worker)


@dataclass(frozen=True)
class JobOptions:
    """The options with which workers are run and shown, wherever that is."""

    show: set[int] | None = None  # ranks whose output is shown; None for all. The evaluator's always is
    pin: bool = True  # give each worker cores of its own and as many threads
    gpus_per_worker: int = 0  # 0: an equal part of those that are there; on Ray none
    grace: float = 10.0  # seconds between asking a worker to end (SIGTERM) and making it (SIGKILL)
    environment: Mapping[str, str] | None = None  # in place of this process's own
    output: TextIO | None = None  # in place of standard output


class Job(Generic[_Worker]):
    """Base of the kinds of jobs. They fill `workers` in `start`, relay what each writes through a `Relay`, and say when
    one has ended.

    Args:
      count: processes, without an evaluator.
      log_dir: where worker-K.log are written (appended to).
    """

    def __init__(self, count: int, log_dir: Path, options: JobOptions):
        self.count, self.log_dir, self.options = count, log_dir, options
        environment = os.environ if options.environment is None else options.environment
        self.environment = {name: value for name, value in environment.items() if name != "TF_CONFIG"}
        self.environment[token.VARIABLE] = self.environment.get(token.VARIABLE) or token.make()
        self.output = options.output or sys.stdout
        self.workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._kill_at: float | None = None  # set: the workers have been asked to end; 0: they are being killed
        self._asked_to_stop = False  # from outside, and before any worker failed

    # -- what a kind of job does its own way ---------------------------------------------------------------------------

    def start(self) -> None:
        """Starts all workers, or none."""
        raise NotImplementedError

    def start_standbys(self) -> None:
        """Starts spare processes for the next job, where there can be any."""

    def _notice_end(self, worker: _Worker) -> None:
        """Sets code and ended_at of a worker that has ended, once its output is complete."""
        raise NotImplementedError

    def _handle_ends(self, now: float) -> None:
        """Does further work after the ends have been noticed, at every look."""

    def _is_tolerated(self, worker: _Worker) -> bool:
        """Whether the job goes on without this worker, which has failed."""
        return False

    def resize(self, workers: int) -> bool:
        """Whether the job goes on with another number of workers, without a restart: most cannot (ElasticJob can)."""
        return False

    def _all_started(self) -> bool:
        return len(self.workers) >= self.count

    def _is_finished(self) -> bool:
        """Whether the job has ended well, whatever became of some workers."""
        return False

    def _release(self) -> None:
        """Frees what the job holds after the last worker's end."""

    # -- what they share -----------------------------------------------------------------------------------------------

    def open_log(self, name: str, command: Sequence[str]) -> BinaryIO:
        """The log of a worker, with a header for this start. Raises ConfigError if it cannot be written."""
        path = self.log_dir / f"{name.replace(' ', '-')}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            log = open(appended_to(path), "ab", buffering=0)  # noqa: SIM115 - closed by the relay
            log.write(f"\n===== {time.strftime('%Y-%m-%d %H:%M:%S')} {shlex.join(command)}\n".encode())
            return log
        except OSError as error:
            raise ConfigError(
                f"The log {path} cannot be written ({error.strerror}): choose another --run_dir."
            ) from None

    def say(self, line: str) -> None:
        """A line on the terminal, whole, from any thread."""
        with self._lock, contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            self.output.write(line + "\n")
            self.output.flush()

    def poll(self) -> JobResult | None:
        """Looks once, without waiting: stops all if one has failed. None while any process runs, then how it went."""
        for worker in self.workers:
            self._notice_end(worker)
        now = time.monotonic()
        self._handle_ends(now)
        trainers = [worker for worker in self.workers if worker.rank is not None]
        failed = [worker for worker in trainers if worker.code and not self._is_tolerated(worker)]
        if failed and self._kill_at is None:
            known = any(root_cause_order(worker) == 0 for worker in failed)
            # Where one saved on request (42) the others are saving as well, and a second SIGTERM would cut that short.
            saving = all(worker.code == ExitCode.PREEMPTED for worker in failed)
            patience = self.options.grace if saving else _CAUSE_KNOWN_SECONDS if known else _CAUSE_UNKNOWN_SECONDS
            if now - min(worker.ended_at for worker in failed) > patience or all(
                worker.code is not None for worker in trainers
            ):
                self._stop_after_failure()
        if self._kill_at is not None and now > self._kill_at:
            self.kill()
        if any(worker.code is None for worker in self.workers):
            return None
        self._release()
        return self._result()

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
        """Asks every worker to save and end (SIGTERM); `poll` and `wait` kill those that have not within the grace
        period.
        """
        if self._kill_at is None:
            self._asked_to_stop = not any(worker.code for worker in self.workers if worker.rank is not None)
        self._request_stop(self.options.grace)

    def _request_stop(self, grace: float) -> None:
        if self._kill_at is None:
            self._kill_at = time.monotonic() + grace
            self.forward(signal.SIGTERM)

    def _stop_after_failure(self) -> None:
        self._request_stop(min(self.options.grace, _FAILURE_GRACE_SECONDS))

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
        """Sends SIGKILL to what is left, with all that it started. `wait` then returns at once."""
        self._kill_at = 0.0
        self.forward(signal.SIGKILL)

    def _result(self) -> JobResult:
        codes = {worker.name: worker.exit_code for worker in self.workers}
        # An evaluator that was stopped with the workers is no failure.
        failed = [
            worker for worker in self.workers if worker.code and (worker.rank is not None or self._kill_at is None)
        ]
        if self._is_finished() or not failed:
            if self._all_started():
                return JobResult(ExitCode.OK, "", codes)
            return JobResult(ExitCode.PREEMPTED, "the job was asked to stop before all workers were started", codes)
        cause = min(failed, key=lambda worker: (root_cause_order(worker), worker.ended_at))
        if self._asked_to_stop and (early := _ended_before_they_could_save(failed)):
            return JobResult(ExitCode.PREEMPTED, f"the job was asked to stop before {early} could save", codes)
        return JobResult(
            code=cause.exit_code if cause.exit_code > 0 else ExitCode.PEER_LOST,
            cause=describe(cause),
            exit_codes=codes,
            last_lines=() if cause.shown else tuple(cause.last_lines),
            rank=cause.rank,
        )


def _ended_before_they_could_save(failed: Sequence[Worker]) -> str:
    """The workers that SIGTERM killed, as it does while they start, and scripts always; "" if one failed otherwise."""
    killed = [worker.name for worker in failed if worker.code == -signal.SIGTERM]
    consequences = (-signal.SIGTERM, ExitCode.PREEMPTED, ExitCode.PEER_LOST, ExitCode.STARTUP)
    return " and ".join(killed) if all(worker.code in consequences for worker in failed) else ""


class Relay:
    """Copies a worker's output to its log and, line by line under its name, to the terminal."""

    def __init__(self, job: Job, worker: Worker, log: BinaryIO):
        self._job, self._worker, self._log = job, worker, log
        self._reader, self._prefix = LineReader(), f"[{worker.name}] "
        self._color = job.output.isatty() and "NO_COLOR" not in job.environment
        if self._color:
            color = _COLORS[(job.count if worker.rank is None else worker.rank) % len(_COLORS)]
            self._prefix = f"\x1b[{color}m{self._prefix}\x1b[0m"

    def feed(self, data: bytes) -> None:
        """Takes what the worker has written; b"" at the end of it."""
        with contextlib.suppress(OSError):  # a full disk must not stop the job
            self._log.write(data)
        for text in [
            line for line in self._reader.feed(data, final=not data) if not any(noise in line for noise in _NOISE)
        ]:
            self._worker.last_lines.append(text)
            if text.startswith(_ERROR):
                self._worker.error = text.removeprefix(_ERROR)
            if self._worker.shown:
                self._job.say(f"{self._prefix}{text}" + ("\x1b[0m" if self._color and "\x1b" in text else ""))
        if not data:
            self._log.close()
