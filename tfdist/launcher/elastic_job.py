"""A local job whose workers survive the loss of others: when one is lost, the others continue in the same processes,
from copies of the state in their memory, and a new process joins them when it is ready. membership.py decides who is in
a group.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdist.control.backoff import wait_seconds
from tfdist.control.exit_codes import RESTARTABLE, ExitCode
from tfdist.control.membership import Groups
from tfdist.control.tf_config import worker_environment
from tfdist.control.token import VARIABLE, Secret
from tfdist.launcher.local_job import LocalJob, ProcessEnvironment
from tfdist.launcher.workers import JobResult, LocalWorker, describe

_LONGEST_WAIT_SECONDS = 60.0


@dataclasses.dataclass
class _Retry:
    """When a slot whose worker was lost is filled again. Forgotten if the group with that worker has made progress."""

    start_at: float  # monotonic seconds
    next_wait: float  # seconds, after one more loss


class ElasticJob(LocalJob):
    """A LocalJob whose group of workers changes. A worker's slot (name, log, cores, port) is fixed; its rank may change
    with every group.

    Args:
      workers: largest possible number of workers; `wanted`: how many are started and kept running; `least`: if fewer
        are left, they save the state that they have in memory, and the job ends with PEER_LOST.
      losses: how many workers may be lost in a row without progress; the next loss makes the job fail.
      grow_after: seconds for which a slot is left out after its workers were lost twice in a row, each before its group
        made progress; doubled by each further loss.
    """

    def __init__(
        self,
        command: Sequence[str],
        workers: int,
        log_dir: Path,
        *,
        wanted: int,
        least: int,
        losses: int,
        grow_after: float,
        **options: Any,
    ):
        super().__init__(command, workers, log_dir, **options)
        self.wanted, self.least, self.most_losses, self.grow_after = wanted, least, losses, grow_after
        self.groups = Groups(Secret(self.environment[VARIABLE].strip().encode()))
        self.started_at_once = wanted
        self._losses = self._failed_starts = 0  # in a row
        self._step = -1  # of the newest copy from which a group resumed
        self._next_start = 0.0
        self._retries: dict[int, _Retry] = {}  # by slot
        self._members: tuple[int, ...] = ()  # slots of the newest group
        self._joined: set[int] = set()  # ids of processes that have been in a group
        self._over = False  # the run has ended or failed: waiting workers are no longer needed
        self._too_few = ""  # set: the sentence with which the job ends

    def _process_environment(self, rank: int | None, gpus: dict[str, str]) -> ProcessEnvironment:
        started_in = super()._process_environment(rank, gpus)
        if rank is not None:
            # Alone until it is in a group.
            started_in.environment.update(worker_environment([self._ports.addresses[rank]], 0, 0, {}))
            started_in.environment.update(self.groups.invitation(rank))
        return started_in

    def resize(self, workers: int) -> bool:
        """Sets the number of workers from now on, without a restart."""
        self.say(f"tfdist: from {self.wanted} to {workers} workers")
        self.wanted = workers
        return True

    def poll(self) -> JobResult | None:
        """Checks all workers once, see Job."""
        for worker in self.workers:
            self._notice_end(worker)
        self.groups.look()
        self._note_ended()
        stopping = self._kill_at is not None
        if self._over or stopping:
            self.groups.dismiss(only_newcomers=not self._over)
        if not self._over and self.groups.generation:
            self._drop_lost_workers()
            if not stopping:
                self._start_missing_worker()
        self._form_group()
        self._kill_those_that_hold_up()
        return super().poll()

    # -- the steps of one poll -------------------------------------------------------------------------------------

    def _trainers(self) -> list[LocalWorker]:
        return [worker for worker in self.workers if worker.rank is not None]

    def _alive(self) -> list[LocalWorker]:
        return [worker for worker in self._trainers() if worker.code is None]

    def _was_in_group(self, worker: LocalWorker) -> bool:
        return worker.process.pid in self._joined

    def _note_ended(self) -> None:
        """Removes workers that have ended from their groups."""
        for worker in self._trainers():
            member = self.groups.connected.get(worker.slot)
            if worker.code is not None and member:
                self._over |= worker.code == 0 and member.generation > 0 and "dismissed" not in member.sent
                self.groups.remove(worker.slot)

    def _drop_lost_workers(self) -> None:
        """Removes dead workers without which the job can continue. Those that are kept fail the job (Job.poll)."""
        survivors, left = any(map(self._was_in_group, self._alive())), len(self.groups.connected)
        for worker in [worker for worker in self._trainers() if worker.code is not None]:
            if worker.code == 0:  # dismissed
                self._remove(worker)
            elif survivors and not self._was_in_group(worker):
                self._failed_starts += 1
                self._remove(worker, f"{describe(worker)}, before it could join")
                self._wait(self._failed_starts)
            elif survivors and self._may_be_lost(worker.exit_code):
                loss = f"{describe(worker)}; {left} of {self.wanted} workers {'is' if left == 1 else 'are'} left"
                self._losses += 1
                self._count_loss(worker.slot)
                self._remove(worker, loss)
                self._wait(self._losses - 1)
                if left < self.least and self._kill_at is None:
                    self._too_few = f"{loss}, fewer than --min_workers={self.least}"
                    self._request_stop(self.options.grace)

    def _may_be_lost(self, code: int) -> bool:
        """Returns whether continuing without this worker can help."""
        own_fault = code in set(ExitCode) and (code not in RESTARTABLE or code == ExitCode.PREEMPTED)
        return not own_fault and self._losses < self.most_losses

    def _remove(self, worker: LocalWorker, why: str = "") -> None:
        if why:
            self.say(f"tfdist: {why}.")
        self.workers.remove(worker)

    def _wait(self, failures: int) -> None:
        """Sets when the next worker may start: at once if `failures` is 0, else with exponential backoff."""
        self._next_start = time.monotonic() + wait_seconds(failures, _LONGEST_WAIT_SECONDS)

    def _count_loss(self, slot: int) -> None:
        """Sets when the next worker may start in this slot. Progress that the others make without it changes nothing:
        each time that it joins and dies, they lose time."""
        wait = self._retries[slot].next_wait if slot in self._retries else 0.0
        self._retries[slot] = _Retry(time.monotonic() + wait, 2 * wait or self.grow_after)

    def _seconds_left_out(self, slot: int) -> float:
        return self._retries[slot].start_at - time.monotonic() if slot in self._retries else 0.0

    def _start_missing_worker(self) -> None:
        """Starts one worker if fewer run than are wanted."""
        taken = {worker.slot for worker in self._trainers()}
        free = [slot for slot in range(self.count) if slot not in taken and self._seconds_left_out(slot) <= 0]
        if len(taken) >= self.wanted or not free or time.monotonic() < self._next_start:
            return
        if not self._start_another(free[0]):
            self._failed_starts += 1
            self._wait(self._failed_starts)

    def _form_group(self) -> None:
        """Forms a group, if it is time for one. When the job is to stop, forms a last one of the workers that are left,
        which saves and ends.
        """
        if self._over:
            return
        least = self.least if self._kill_at is None else 1
        formed = self.groups.form(self._ports.addresses, self.wanted, least, len(self._trainers()))
        if formed is None:
            return
        if formed.step > self._step:
            self._step, self._losses = formed.step, 0
            for slot in self._members:
                self._retries.pop(slot, None)
        self._joined |= {worker.process.pid for worker in self._alive() if worker.rank in formed.slots}
        if formed.newcomers:
            self._failed_starts = 0
        ranks = ", ".join(f"{self._name(slot)} is rank {rank}" for rank, slot in enumerate(formed.slots))
        self.say(
            f"tfdist: group {formed.generation}: {ranks}"
            + (f"; from step {formed.step}, which is in memory" if formed.step >= 0 else "")
        )
        for slot in self._members:
            if slot not in formed.slots and (seconds := self._seconds_left_out(slot)) > 0:
                self.say(
                    f"tfdist: {self._name(slot)} was lost again without progress; it is tried again in {seconds:.0f} s."
                )
        self._members = formed.slots

    def _kill_those_that_hold_up(self) -> None:
        """Kills workers that, long after the others of their group, have not noticed that it is broken; and workers
        that wait to join a job that has ended."""
        broken, connected = self.groups.broken_since, self.groups.connected
        if broken is not None and time.monotonic() - broken > self.options.grace:
            for worker in self._alive():
                if worker.slot in connected and connected[worker.slot].busy:
                    worker.lost = (
                        f"did not leave its broken group within --grace={self.options.grace:g} s of the others, and was"
                        " killed"
                    )
                    worker.signal(signal.SIGKILL)
        members = [worker for worker in self._trainers() if self._was_in_group(worker)]
        if members and all(worker.code is not None for worker in members):
            for worker in self._alive():
                worker.signal(signal.SIGKILL)

    # -- the end ---------------------------------------------------------------------------------------------------

    def _stop_after_failure(self) -> None:
        self._over = True
        super()._stop_after_failure()

    def _all_started(self) -> bool:
        return self.groups.generation > 0 or len(self._trainers()) >= self.started_at_once

    def _result(self) -> JobResult:
        members = [worker for worker in self._trainers() if self._was_in_group(worker)]
        if members:  # then the exit codes of workers that never joined do not matter
            self.workers = members + [worker for worker in self.workers if worker.rank is None]
        self.groups.close()
        result = super()._result()
        return dataclasses.replace(result, code=ExitCode.PEER_LOST, cause=self._too_few) if self._too_few else result
