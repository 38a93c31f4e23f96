"""Base class of jobs of several processes, wherever these run: output, logs, the first failure, the end.

LocalJob (local_job.py) runs the processes on this machine, RayJob (ray_job.py) on the nodes of a Ray cluster.
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
from tfdist.launcher.workers import JobResult, Worker, describe, root_cause_order

_COLORS = (36, 33, 35, 32, 34, 31)
# When one worker dies, the others fail too. They get some seconds to end by themselves, with a clearer message than
# ours, before they are asked to end: fewer if the cause is known, more while all that have ended only lost a peer.
_CAUSE_KNOWN_SECONDS = 1.0
_CAUSE_UNKNOWN_SECONDS = 3.0
_FAILURE_GRACE_SECONDS = 10.0  # after a failure nothing new can be saved, but writes in progress may finish
_ERROR = "tfdist: error: "  # prefix of the line in which a command names its error
# Lines that TensorFlow's C++ code prints at every start, whatever its log level, about its own logging, processors, and
# missing GPUs. They are kept in the log files, but not shown.
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
    """Options for running workers and showing their output, for every kind of job."""

    show: set[int] | None = None  # ranks whose output is shown; None: all. The evaluator's output is always shown
    pin: bool = True  # give each worker its own cores, and as many threads as it has cores
    gpus_per_worker: int = 0  # 0: an equal share of the available GPUs; on Ray none
    grace: float = 10.0  # seconds between asking a worker to end (SIGTERM) and killing it (SIGKILL)
    environment: Mapping[str, str] | None = None  # in place of this process's own
    output: TextIO | None = None  # in place of standard output


class Job(Generic[_Worker]):
    """Base class of all jobs. Subclasses fill `workers` in `start`, relay each worker's output through a `Relay`, and
    detect when a worker has ended.

    Args:
      count: number of processes, without the evaluator.
      log_dir: folder of the files worker-K.log, which are appended to.
    """

    def __init__(self, count: int, log_dir: Path, options: JobOptions):
        self.count, self.log_dir, self.options = count, log_dir, options
        self.environment = dict(os.environ if options.environment is None else options.environment)
        self.environment[token.VARIABLE] = self.environment.get(token.VARIABLE) or token.make()
        self.output = options.output or sys.stdout
        self.workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._kill_at: float | None = None  # set: the workers have been asked to end; 0: they are being killed
        self._asked_to_stop = False  # from outside, and before any worker failed

    # -- what subclasses implement or override -------------------------------------------------------------------------

    def start(self) -> None:
        """Starts all workers, or none."""
        raise NotImplementedError

    def start_standbys(self) -> None:
        """Starts spare processes for the next job, if this kind of job supports them."""

    def _notice_end(self, worker: _Worker) -> None:
        """Sets code and ended_at of a worker that has ended, once its output is complete."""
        raise NotImplementedError

    def _handle_ends(self, now: float) -> None:
        """Does further work in every `poll`, after the ends of workers have been noticed."""

    def _is_tolerated(self, worker: _Worker) -> bool:
        """Returns whether the job continues without this failed worker."""
        return False

    def resize(self, workers: int) -> bool:
        """Changes the number of workers without a restart. Returns False if the job cannot (only ElasticJob can)."""
        return False

    def _all_started(self) -> bool:
        return len(self.workers) >= self.count

    def _is_finished(self) -> bool:
        """Returns whether the job has succeeded, even if some workers have failed."""
        return False

    def _release(self) -> None:
        """Frees the job's resources after the last worker has ended."""

    # -- what all jobs share -------------------------------------------------------------------------------------------

    def open_log(self, name: str, command: Sequence[str]) -> BinaryIO:
        """Opens the log of a worker and writes a header for this start. Raises ConfigError if it cannot be opened."""
        path = self.log_dir / f"{name.replace(' ', '-')}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            log = open(appended_to(path), "ab", buffering=0)  # noqa: SIM115 - closed by the relay
        except OSError as error:
            raise ConfigError(
                f"The log {path} cannot be written ({error.strerror}): choose another --run_dir."
            ) from None
        with contextlib.suppress(OSError):  # a full disk must not stop the job
            log.write(f"\n===== {time.strftime('%Y-%m-%d %H:%M:%S')} {shlex.join(command)}\n".encode())
        return log

    def say(self, line: str) -> None:
        """Prints a whole line on the terminal. May be called from any thread."""
        with self._lock, contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            self.output.write(line + "\n")
            self.output.flush()

    def poll(self) -> JobResult | None:
        """Checks all workers once, without waiting, and stops all if one has failed.

        Returns None while any process runs, then the result.
        """
        for worker in self.workers:
            self._notice_end(worker)
        now = time.monotonic()
        self._handle_ends(now)
        trainers = [worker for worker in self.workers if worker.rank is not None]
        failed = [worker for worker in trainers if worker.code and not self._is_tolerated(worker)]
        if failed and self._kill_at is None:
            known = any(root_cause_order(worker) == 0 for worker in failed)
            # If one has saved on request (42), the others are saving too, and a second SIGTERM would interrupt them.
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
        """Waits until all workers have ended, and stops all when one fails. Returns the result."""
        try:
            while (result := self.poll()) is None:
                time.sleep(0.05)
            return result
        except BaseException:
            self.kill()
            raise

    def request_stop(self) -> None:
        """Asks every worker to save and end (SIGTERM). `poll` and `wait` kill those that are still running after the
        grace period.
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
        """Ends every worker: sends SIGTERM, and SIGKILL after the grace period."""
        self.request_stop()
        return self.wait()

    def kill(self) -> None:
        """Sends SIGKILL to all workers still running and to their child processes. `wait` then returns at once."""
        self._kill_at = 0.0
        self.forward(signal.SIGKILL)

    def _result(self) -> JobResult:
        codes = {worker.name: worker.exit_code for worker in self.workers}
        # An evaluator that was stopped together with the workers does not count as a failure.
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
            trained=all(worker.code == 0 for worker in self.workers if worker.rank is not None),
        )


def _ended_before_they_could_save(failed: Sequence[Worker]) -> str:
    """Returns the names of the workers that SIGTERM killed; "" if any failed for another reason than the stop.

    SIGTERM kills a worker that is still starting, and a script at any time.
    """
    killed = [worker.name for worker in failed if worker.code == -signal.SIGTERM]
    consequences = (-signal.SIGTERM, ExitCode.PREEMPTED, ExitCode.PEER_LOST, ExitCode.STARTUP)
    return " and ".join(killed) if all(worker.code in consequences for worker in failed) else ""


class Relay:
    """Copies a worker's output to its log and, line by line and prefixed with its name, to the terminal."""

    def __init__(self, job: Job, worker: Worker, log: BinaryIO):
        self._job, self._worker, self._log = job, worker, log
        self._reader, self._prefix = LineReader(), f"[{worker.name}] "
        self._color = job.output.isatty() and "NO_COLOR" not in job.environment
        if self._color:
            color = _COLORS[(job.count if worker.rank is None else worker.rank) % len(_COLORS)]
            self._prefix = f"\x1b[{color}m{self._prefix}\x1b[0m"

    def feed(self, data: bytes) -> None:
        """Takes a piece of the worker's output; b"" marks its end."""
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
