"""Restarts a job after a failure; decides when, how often, and when to give up.

The contract with any engine that restarts jobs (this one, Kubernetes, Slurm): a job that ended with a code of
exit_codes.RESTARTABLE is started again with the same flags and run folder, with any number of workers. It resumes from
the newest valid snapshot. All workers are restarted, since none can rejoin a TensorFlow cluster.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tfdist.control.backoff import wait_seconds
from tfdist.control.exit_codes import RESTARTABLE, ExitCode, StartupError
from tfdist.control.run_address import SNAPSHOTS
from tfdist.control.terminal import say
from tfdist.launcher.job import Job
from tfdist.launcher.worker_count import WorkerSupply
from tfdist.launcher.workers import JobResult

_SNAPSHOT = re.compile(r"^step-(\d+)$")


@dataclass
class RestartPolicy:
    """How many failures without progress are allowed, and the backoff after each.

    The wait doubles from `first_wait` to at most `longest_wait` seconds, times a random factor of 0.5 to 1, so that
    many jobs that failed together do not restart together. Any progress (a newer snapshot or backup) resets the count
    of failures.
    """

    max_restarts: int
    first_wait: float = 1.0
    longest_wait: float = 60.0
    random: Callable[[], float] = random.random
    failures: int = 0  # since the last progress
    step: int = -1  # of the newest snapshot or backup; -1: none

    def after(self, code: int, step: int) -> float | None:
        """Returns the seconds to wait before the restart; None: give up. step: of the newest snapshot or backup when
        the job ended."""
        if self.max_restarts == 0:
            return None
        known = {member.value for member in ExitCode}
        if code in known and ExitCode(code) not in RESTARTABLE:
            return None
        if step > self.step:
            self.step, self.failures = step, 0
        if code == ExitCode.PREEMPTED:  # it saved and asked to be started again: not a failure
            return 0.0
        self.failures += 1
        if self.failures > self.max_restarts:
            return None
        return wait_seconds(self.failures, self.longest_wait, self.first_wait) * (0.5 + self.random() / 2)


class Supervisor:
    """Runs jobs made by `make_job(workers)` until one ends well, the policy gives up, or `stop` is called.

    workers: decides the number of workers. When it changes while a job runs, the job saves, ends and is restarted.
    standby_after: seconds into a job after which spare processes for the next one are started; None: never.
    counted: what `newest_step` counts, for messages.
    """

    def __init__(
        self,
        make_job: Callable[[int], Job],
        policy: RestartPolicy,
        newest_step: Callable[[], int],
        workers: WorkerSupply,
        standby_after: float | None = None,
        counted: str = "step",
    ):
        self.make_job, self.policy, self.newest_step = make_job, policy, newest_step
        self.workers, self.standby_after, self.counted = workers, standby_after, counted
        self.job: Job | None = None
        self.restarts = 0
        self._stopped = False

    def stop(self) -> None:
        """Prevents further restarts. The caller must signal the running job itself."""
        self._stopped = True
        self.workers.stop()

    def run(self) -> JobResult:
        """Runs jobs and returns the result of the last one. Its code is CRASH_LOOP if the job failed too often without
        progress."""
        while True:
            count = self.workers.ask()
            if self._stopped:
                return JobResult(ExitCode.PREEMPTED, "the job was asked to stop before it was started", {})
            job = None
            try:
                self.job = job = self.make_job(count)
                if self._stopped:  # stopped while the job was being made: the caller had no job to signal
                    job.request_stop()
                job.start()
                result, resized = self._watch(job, count)
            except StartupError as error:  # of `make_job` and `start`
                result, resized = JobResult(error.exit_code, str(error).rstrip("."), {}), False
            finally:
                if job:
                    job.kill()
            if result.code == ExitCode.OK or result.trained or self._stopped:
                return result
            step = self.newest_step()
            if resized and result.code == ExitCode.PREEMPTED:
                continue
            progress = step > self.policy.step
            wait = self.policy.after(result.code, step)
            if wait is None:
                return self._give_up(result, step)
            if result.code != ExitCode.PREEMPTED:
                self.workers.failed(result.rank, progress)
            self.restarts += 1
            where = f"from {self.counted} {step}" if step >= 0 else "from the beginning"
            fewer = f" with {self.workers.count} workers" if self.workers.count != count else ""
            say(f"{result.cause}; restart number {self.restarts}{fewer} in {wait:.1f} s, {where}.")
            self._sleep(wait)
            if self._stopped:
                return result

    def _watch(self, job: Job, count: int) -> tuple[JobResult, bool]:
        """Watches a job until it ends. Returns (result, whether it was asked to end for another number of workers)."""
        started, resized = time.monotonic(), False
        while (result := job.poll()) is None:
            if self.standby_after is not None and time.monotonic() - started > self.standby_after:
                job.start_standbys()
                started = float("inf")
            if not resized and not self._stopped and (wanted := self.workers.wanted()) != count:
                if job.resize(wanted):
                    count = wanted
                    continue
                resized = True
                say(f"from {count} to {self.workers.count} workers: the job saves and is restarted.")
                job.request_stop()
            time.sleep(0.05)
        return result, resized

    def _give_up(self, result: JobResult, step: int) -> JobResult:
        if self.policy.failures <= self.policy.max_restarts or self.policy.max_restarts == 0:
            return result  # a restart would not help, or is not wanted
        first = "snapshot" if self.counted == "step" else self.counted
        where = f"after {self.counted} {step}" if step >= 0 else f"before the first {first}"
        cause = (
            f"the job failed {self.policy.failures} times {where} without progress"
            f" (--max_restarts={self.policy.max_restarts}); the last time, {result.cause}"
        )
        return JobResult(ExitCode.CRASH_LOOP, cause, result.exit_codes)

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._stopped:
            time.sleep(0.05)


def newest_saved_step(run_dir: Path, backup_folder: str) -> int:
    """Returns the step of the newest snapshot's or backup's folder; -1 if there is none.

    Does not check whether it is valid: the workers do.
    """
    names = list[str]()
    snapshots = (run_dir / SNAPSHOTS, run_dir / "parts")  # if the run is in a store, a machine may have only parts
    for folder in (*snapshots, *([Path(backup_folder)] if backup_folder else [])):
        with contextlib.suppress(OSError):
            names += os.listdir(folder)
    return max((int(match.group(1)) for match in map(_SNAPSHOT.match, names) if match), default=-1)
