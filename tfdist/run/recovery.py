"""The state of a run that outlives its processes: restores it, saves it, and rolls back after bad numbers. Every worker
has a Recovery, so that all restore together.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfdist import flags
from tfdist.artifacts import restore, state
from tfdist.artifacts.policy import TimePolicy
from tfdist.build import Job
from tfdist.config.run_options import RunConfig
from tfdist.control.amounts_text import counted
from tfdist.control.exit_codes import DivergedError
from tfdist.control.faults import Faults
from tfdist.run.in_memory_checkpoint import InMemoryCheckpoint, WorkerMemory
from tfdist.run.moving_statistics import sync_moving_statistics
from tfdist.run.progress import Progress
from tfdist.run.remote_run import RemoteRun
from tfdist.run.sample_identity import SampleIdentity
from tfdist.run.snapshot_files import SnapshotFiles
from tfdist.runtime.decisions import of_the_chief
from tfdist.runtime.weight_check import check_weights
from tfdist.telemetry.timer import Clock
from tfdist.training.log_interval import IntervalSums


@dataclass(frozen=True)
class _Found:
    """The state that the chief has chosen to resume from.

    manifest: None: there is nothing. in_parts: every worker reads its part. arrays: on the chief, unless in parts.
    """

    messages: list[str]
    manifest: dict[str, Any] | None = None
    in_parts: bool = False
    arrays: Mapping[str, np.ndarray] | None = None

    def without_arrays(self) -> dict[str, Any]:
        """The fields that the other workers need, as JSON."""
        return {"messages": self.messages, "manifest": self.manifest, "in_parts": self.in_parts}


class Recovery:
    """The state of a run, see above. `evaluated`: the last evaluated step and its scores, which its snapshot keeps;
    `losses`: of the log lines; `interval_sums`: of the steps since the last line."""

    def __init__(
        self,
        job: Job,
        folder: Path,
        clock: Clock,
        faults: Faults,
        memory: WorkerMemory | None,
        stored: RemoteRun | None,
    ):
        checkpoint = job.config.checkpoint
        self.job, self.config, self.runtime, self.clock, self.faults = job, job.config, job.runtime, clock, faults
        self.chief = self.runtime.rank == 0
        self.state = job.state or state.WholeState(state.collect(job.model, job.optimizer, job.step.variables))
        self.is_copied = self.runtime.size > 1 or self.runtime.replicas > 1  # something exists in more than one copy
        self.files = SnapshotFiles(folder, job.config, faults, writes=self.chief, stored=stored)
        if job.state and self.runtime.size > 1:
            self.files.share(self.runtime, self.config.cluster.save_timeout)
        self._own_parts = job.state if self.files.in_parts else None  # this worker's part of snapshots
        self.time_policy = memory.time_policy if memory and memory.time_policy else TimePolicy(checkpoint.save_minutes)
        if memory:
            memory.time_policy = self.time_policy
        self.losses, self.interval_sums = restore.LossContinuity(), IntervalSums()
        self.evaluated: tuple[int, Mapping[str, float]] = -1, {}
        self.progress = Progress(job.plan.global_batch, job.train_split.size)
        self._samples = SampleIdentity(job.train_split)
        self.stream_cut = job.stream_cut  # after a restore: that of the resumed run
        self._saved_step, self._copied_step, self._saved_scores = -1, -1, {}
        self._rollbacks, self.has_gone_on, self.run_id = 0, False, ""

    def check_epochs(self, run: RunConfig, step: int) -> None:
        """See restore.check_epochs. run: the options as given by the user."""
        progress = self.progress
        restore.check_epochs(run, progress.trained(step), step, progress.global_batch, progress.size)

    def learning_rate(self) -> float:
        return float(self.job.schedule(self.job.optimizer.iterations.value))

    # -- restoring -------------------------------------------------------------------------------------------------

    def restore(self, checkpoint: InMemoryCheckpoint | None = None, back: bool = False) -> tuple[list[str], int]:
        """Restores from the chief's choice (the chief's `checkpoint`, if it has one), or leaves everything as it is. A
        collective call. back: after bad numbers.

        Returns messages and the step to resume from. Raises CheckpointError on all workers.
        """
        self.faults.at("restore", 0)
        messages: list[str] = []
        while True:
            found = self._picked_by_chief(checkpoint, back)
            self.has_gone_on = found.manifest is not None
            messages += found.messages
            if found.manifest is None:
                return messages, 0
            if not (self._own_parts and found.in_parts):
                self._take_over(found.arrays)
                break
            if not self.files.read_part(found.manifest, self._own_parts):
                break
            messages.pop()  # the chief's next choice says why this one is passed over
        return messages + self._adopt(found.manifest), found.manifest["step"]

    def _picked_by_chief(self, checkpoint: InMemoryCheckpoint | None, back: bool) -> _Found:
        """Returns the chief's choice on all workers. What the chief raises is raised on all."""
        chosen = _Found([])

        def pick() -> dict[str, Any]:
            nonlocal chosen
            chosen = self._from_memory(checkpoint) if checkpoint else self._from_files(back)
            return chosen.without_arrays()

        return _Found(**of_the_chief(self.runtime, pick), arrays=chosen.arrays)

    def _take_over(self, arrays: Mapping[str, np.ndarray] | None) -> None:
        """Gives all workers the arrays of the chief."""
        fitted = {} if arrays is None else self.state.fitted(arrays)
        self.state.assign(state.chiefs_arrays(self.runtime, self.state.table(), fitted))

    def _from_memory(self, checkpoint: InMemoryCheckpoint) -> _Found:
        """The chief's choice, from memory. Raises the errors of a failing store."""
        self.files.begin_to_send(even_if_full=True)
        message = (
            f"continued from memory: step {checkpoint.step}, {checkpoint.manifest['consumed']:,} samples consumed, by"
            f" {checkpoint.manifest['workers']} workers before, now {self.runtime.size}"
        )
        return _Found([message], {**checkpoint.manifest, "must_be_saved": True}, arrays=checkpoint.arrays)

    def _from_files(self, back: bool) -> _Found:
        """Chooses the snapshot to resume from among the files. Called on the chief."""
        files, config = self.files, self.config
        snapshot, messages = files.bring_and_pick(config.replace(resume="auto") if back else config, back)
        if snapshot is None:
            return _Found(messages)
        table, left_out = files.store.table(snapshot), set[str]()
        if config.checkpoint.allow_config_change:
            messages += self._samples.changes(snapshot)
            left_out = state.carried_by_others(table, self.state.table())
        else:
            self._samples.check(snapshot)
        if left_out:
            arrays = sum(state.CARRIED in key for key in left_out)
            messages.append(f"dropped gradients of {arrays} arrays that --compression had not sent yet")
        self.state.check({key: each for key, each in table.items() if key not in left_out})
        in_parts = files.is_shared(snapshot)
        manifest, size = dict(snapshot.manifest) | {"must_be_saved": not files.is_own(snapshot)}, self.runtime.size
        change = f", written by {counted(was, 'worker')}, now {size}" if (was := manifest["workers"]) != size else ""
        messages.append(
            f"resumed from {snapshot.path}: step {manifest['step']}, {manifest['consumed']:,} samples consumed{change}"
        )
        if in_parts:
            return _Found(messages, manifest, in_parts)
        arrays = {key: array for key, array in files.store.read(snapshot).items() if key not in left_out}
        return _Found(messages, manifest, arrays=arrays)

    def _adopt(self, manifest: Mapping[str, Any]) -> list[str]:
        """Checks the restored state against its manifest and takes over what is not a variable. Returns messages."""
        step, split = int(self.job.step.counter.numpy()), self.job.train_split
        restore.check_consistency(manifest, step, self.progress.global_batch)
        warning = restore.check_learning_rate(manifest, self.learning_rate(), self.config.digest())
        self.clock.restore(manifest["clock"])
        self.losses = restore.LossContinuity(manifest.get("losses", ()))
        self.stream_cut = restore.stream_cut(manifest, split.name, split.size is None)
        state.restore_generator_states(manifest["generators"])
        self.progress.restore(manifest, step)
        same = manifest if manifest["config_digest"] == self.config.digest() else {}  # a new try if anything changed
        self._rollbacks = max(self._rollbacks, same.get("rollbacks", 0))
        self.interval_sums.restore(same.get("interval_sums", {}))
        self._saved_scores = manifest.get("metrics", {})
        self.evaluated, self._saved_step = (step, self._saved_scores), -1 if manifest.get("must_be_saved") else step
        kept = self.stream_cut != self.job.stream_cut and (
            f"{split.name} is read in {self.stream_cut} parts, as at the start of the run, and every worker"
            " reads all of it"
        )
        return [message for message in (warning, kept) if message]

    def rollback(self, step: int, past: int) -> tuple[list[str], int]:
        """Goes back from bad numbers before `step` to the newest snapshot, and past all batches to `past`.

        A collective call. Returns messages and the step to resume from. Raises DivergedError after too many rollbacks.
        """
        limit, bad = self.config.loop.max_rollbacks, f"Loss or gradients became NaN or infinite before step {step}"
        if self._rollbacks == limit:
            fix = "lower --learning_rate or set --clip_norm"
            raise DivergedError(f"{bad}, after {limit} rollbacks (--max_rollbacks={limit}): {fix}.")
        self._rollbacks += 1
        position = self.progress.consumed(past)
        self.files.finish()
        messages, restored = self.restore(back=True)
        if not self.has_gone_on:
            place = self.files.store.directory
            raise DivergedError(f"{bad}, and {place} has no snapshot to roll back to: make room there, or repair it.")
        passed = position - self.progress.consumed(restored)
        self.progress.pass_over(passed)
        # A snapshot or copy made of this step so far would lead back to the bad batches.
        self._saved_step = self._copied_step = -1
        messages.append(
            f"NaN or infinite values before step {step}: rolled back to step {restored} and skipped {passed:,} samples,"
            f" which are not trained on (rollback {self._rollbacks} of {limit})"
        )
        return messages, restored

    # -- saving ----------------------------------------------------------------------------------------------------

    def save(self, step: int) -> None:
        """Saves a snapshot, unless this step has one with the score for --keep_best. Called on all workers."""
        self.time_policy.saved()
        scores, metric = self._scores(step), self.config.checkpoint.best_metric
        if step == self._saved_step and (metric not in scores or metric in self._saved_scores):
            return
        self.settle_statistics()
        if self.is_copied:  # a snapshot of weights that differ would keep the damage
            check_weights(self.runtime, self.state.held(), f"at step {step}")
        writer = self.files.writer
        if self._own_parts:
            if not self.files.agree(step):
                return  # the next save tries again, also at this step
            arrays = self._own_parts.to_shards()
        else:
            arrays = self.state.to_host(wanted=self.chief, into=writer.recycled() if writer else None)
        self._saved_step, self._saved_scores = step, scores
        if writer:
            writer.save(step, arrays, self._manifest_fields(step))

    def copy(self, step: int, memory: WorkerMemory, now: bool = False) -> None:
        """Copies the state to this worker's memory, if it is time, or `now`. Called on all workers."""
        period = 1 if now else max(1, self.config.checkpoint.elastic_commit_every)
        if self._copied_step >= 0 and step - self._copied_step < period:
            return
        self._copied_step = step
        self.settle_statistics()
        fields = self._manifest_fields(step) | {"step": step}
        memory.checkpoint = InMemoryCheckpoint(step, self.state.to_host(), fields)

    def back_up(self, step: int) -> None:
        """Writes a backup. Called on all workers."""
        backup = self.files.backup
        assert backup
        self.settle_statistics()
        arrays = self.state.to_host(wanted=self.chief, into=backup.writer.recycled() if self.chief else None)
        if self.chief:
            backup.back_up(step, arrays, self._manifest_fields(step))

    def weights(self) -> dict[str, np.ndarray]:
        """key -> array of each of the model's variables, and of those in its layers that Keras does not know of, with
        moving averages if there are any: on the chief. A collective call."""
        with self.job.step.update.averaged():
            return self.state.to_host(wanted=self.chief, only=state.COMPARED)

    def backup_period(self) -> int:
        """Steps between two backups; 0: none."""
        return (self.config.checkpoint.backup_every or self.progress.steps_per_epoch()) if self.files.backup else 0

    def settle_statistics(self) -> None:
        """Sets moving statistics to the first worker's before they are used: if not synchronized, they drift apart."""
        if not self.config.model.sync_batchnorm and self.is_copied:
            sync_moving_statistics(self.job.model, self.state, self.runtime)

    def _scores(self, step: int) -> Mapping[str, float]:
        return self.evaluated[1] if self.evaluated[0] == step else {}  # otherwise they belong to other weights

    def _manifest_fields(self, step: int) -> dict[str, Any]:
        return {
            **self.progress.manifest_fields(step),
            "rollbacks": self._rollbacks,
            "stream_cut": self.stream_cut,
            "samples": self._samples.found if self.chief else {},
            "config_digest": self.config.digest(),
            "identity": self.config.identity(),
            "workers": self.runtime.size,
            "replicas": self.runtime.replicas,
            "strategy": self.runtime.name,
            "versions": flags.package_versions(),
            "variables": self.state.table(),
            "generators": state.generator_states(),
            "clock": self.clock.state(),
            "metrics": self._scores(step),
            "learning_rate": self.learning_rate(),
            "losses": self.losses.losses,
            "interval_sums": self.interval_sums.fields(),
            "time": time.time(),
            "run_id": self.run_id,
        }
