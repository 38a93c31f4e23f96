"""A run's snapshots and backups: what it goes on from, what it leaves, and the way back from bad numbers.

Every worker has one, so that all restore together. Only the chief touches the files, unless the state is spread over a
mesh and all workers see the same folder: then everyone writes and reads its own part (artifacts/parts.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfdist import flags
from tfdist.artifacts import restore, state
from tfdist.artifacts.backup import BackupAndRestore
from tfdist.artifacts.parts import PartedStore
from tfdist.artifacts.policy import Retention, TimePolicy
from tfdist.artifacts.store import Snapshot, SnapshotStore
from tfdist.artifacts.writer import SnapshotWriter
from tfdist.build import Job
from tfdist.config import Config
from tfdist.control.exit_codes import CheckpointError, ConfigError, DivergedError
from tfdist.control.faults import Faults
from tfdist.control.membership import Member
from tfdist.control.signals import SignalRequests
from tfdist.run.agreement import broadcast_json
from tfdist.runtime.weight_check import check_weights
from tfdist.telemetry.timer import Clock

_LAST_WRITE_SECONDS = 10.0  # after an error: a snapshot that is being written is worth this wait
_LAST_PART_SECONDS = 2.0  # and for the part of a worker that may be gone, this


@dataclass(frozen=True)
class Copy:
    """The state of a run at a step, in host memory; what a snapshot is on disk."""

    step: int
    arrays: Mapping[str, np.ndarray]
    manifest: Mapping[str, Any]


@dataclass
class Memory:
    """What the process of a worker keeps while it leaves one group of workers and joins another (elastic.py)."""

    member: Member
    signals: SignalRequests
    copy: Copy | None = None
    time_policy: TimePolicy | None = None  # so that a new group does not begin to count anew


class Recovery:
    """The state of a run that outlives its processes."""

    def __init__(self, job: Job, folder: Path, clock: Clock, faults: Faults, memory: Memory | None = None):
        checkpoint = job.config.checkpoint
        self.job, self.config, self.runtime, self.clock, self.faults = job, job.config, job.runtime, clock, faults
        self.chief = self.runtime.rank == 0
        self.state = job.state or state.WholeState(state.collect(job.model, job.optimizer, job.step.variables))
        self.is_copied = self.runtime.size > 1 or self.runtime.replicas > 1  # there is more than one copy of something
        self.store = SnapshotStore(str(folder / "checkpoints"), lambda step: faults.at("save", step))
        self.in_parts = False
        if job.state and self.runtime.size > 1:
            self._share_folder()
        retention = Retention(checkpoint.keep, checkpoint.keep_every, checkpoint.keep_best) if self.chief else None
        self.writer = None
        if self.chief or self.in_parts:
            self.writer = SnapshotWriter(
                self.store, retention, asynchronous=checkpoint.async_save, attempts=1 if self.in_parts else 2
            )
        self.backup = None
        if checkpoint.backup_dir:
            if self.chief:
                _make_backup_folder(checkpoint.backup_dir)
            self.backup = BackupAndRestore(
                checkpoint.backup_dir,
                checkpoint.backup_every or "epoch",
                checkpoint.double_backup,
                checkpoint.delete_backup,
                writes=self.chief,
            )
        for store in filter(None, (self.store, self.backup and self.backup.store)):
            store.required = restore.REQUIRED
        self.memory = memory
        self.time_policy = memory.time_policy if memory and memory.time_policy else TimePolicy(checkpoint.save_minutes)
        if memory:
            memory.time_policy = self.time_policy
        self.losses = restore.LossContinuity()
        self.evaluation: dict[str, float] = {}
        self.run_id = ""
        self.stream_cut = job.stream_cut  # or that of the run that is gone on with
        self._saved_step = self._copied_step = -1
        self._skipped = 0  # samples that rollbacks have passed over
        self._rollbacks = 0

    def _share_folder(self) -> None:
        """Writing in parts, if every worker sees what the chief writes. A collective."""
        directory = Path(self.store.directory)
        token = broadcast_json(self.runtime, {"token": uuid.uuid4().hex[:8]})["token"]
        mark = directory / f".seen-by-all-{token}"
        if self.chief and self.store.local:
            directory.mkdir(parents=True, exist_ok=True)
            mark.touch()
        self.runtime.barrier()
        self.in_parts = bool(self.runtime.all_gather(np.array([mark.exists()], np.int32)).all())
        if self.chief:
            mark.unlink(missing_ok=True)
        if self.in_parts:
            self.store = PartedStore(
                self.store.directory,
                self.store.before_commit,
                self.runtime.rank,
                self.runtime.size,
                token,
                self.config.cluster.save_timeout or math.inf,
            )

    def position(self, step: int) -> int:
        """Samples consumed when `step` steps are done."""
        return step * self.job.plan.global_batch + self._skipped

    def learning_rate(self) -> float:
        return float(self.job.schedule(self.job.optimizer.iterations.value))

    # -- going on --------------------------------------------------------------------------------------------------

    def restore(self, config: Config | None = None, copy: Copy | None = None) -> tuple[list[str], int]:
        """Restores from the chief's choice (the chief's `copy`, if it has one), or leaves everything as it is. A
        collective.

        Returns messages and the step to go on from. Raises CheckpointError on all workers.
        """
        message: dict[str, Any] = {}
        arrays = None
        self.faults.at("restore", 0)
        if self.chief:
            try:
                message, arrays = self._recall(copy) if copy else self._choose(config or self.config)
            except CheckpointError as error:
                message = {"error": str(error)}  # all must end, and say why
        message = broadcast_json(self.runtime, message)
        if "error" in message:
            raise CheckpointError(message["error"])
        messages, manifest = message["messages"], message["manifest"]
        if manifest is None:
            return messages, 0
        if message["in_parts"]:
            self.state.read(Snapshot(self.store.path(manifest["step"]), manifest["step"], manifest).prefix)
            return messages + self._adopt(manifest), manifest["step"]
        if arrays is not None:
            arrays = self.state.fitted(arrays)
        else:
            arrays = {key: np.zeros(shape, dtype) for key, (_, shape, dtype) in self.state.table().items()}
        keys = sorted(arrays)
        self.state.assign(dict(zip(keys, self.runtime.broadcast([arrays[key] for key in keys]), strict=True)))
        return messages + self._adopt(manifest), manifest["step"]

    def _recall(self, copy: Copy) -> tuple[dict[str, Any], Mapping[str, np.ndarray]]:
        """The chief's part, from memory."""
        before, size = copy.manifest["workers"], self.runtime.size
        return {
            "messages": [
                f"went on from memory: step {copy.step}, {copy.manifest['consumed']:,} samples consumed, by {before}"
                f" workers before, now {size}"
            ],
            "manifest": {**copy.manifest, "in_memory": True},
            "in_parts": False,
        }, copy.arrays

    def _choose(self, config: Config) -> tuple[dict[str, Any], dict[str, np.ndarray] | None]:
        """The chief's part: (messages and manifest for all, arrays)."""
        self.store.clean()
        snapshot, messages = restore.choose(self.store, config, self.backup and self.backup.store)
        if snapshot is None:
            return {"messages": messages, "manifest": None}, None
        for store in filter(None, (self.store, self.backup and self.backup.store)):
            store.set_aside_damaged()
        self.state.check(self.store.table(snapshot))
        in_parts = self.in_parts and snapshot.path == self.store.path(
            snapshot.step
        )  # a backup is on the chief's machine alone
        arrays = None if in_parts else self.store.read(snapshot)
        manifest, size = snapshot.manifest, self.runtime.size
        change = f", written by {manifest['workers']} workers, now {size}" if manifest["workers"] != size else ""
        messages.append(
            f"resumed from {snapshot.path}: step {manifest['step']}, {manifest['consumed']:,} samples consumed{change}"
        )
        return {"messages": messages, "manifest": dict(manifest), "in_parts": in_parts}, arrays

    def _adopt(self, manifest: Mapping[str, Any]) -> list[str]:
        """Checks a restored snapshot against its manifest and takes over what is not a variable. Returns messages."""
        step, plan = int(self.job.step.counter.numpy()), self.job.plan
        restore.check_consistency(manifest, step, plan.global_batch)
        warning = restore.check_learning_rate(manifest, self.learning_rate(), self.config.digest())
        self.clock.restore(manifest["clock"])
        self.losses = restore.LossContinuity(manifest.get("losses", ()))
        split, replicas = (
            self.job.train_split,
            manifest["replicas"],
        )  # a manifest without a cut is of a version that always cut
        self.stream_cut = manifest.get(
            "stream_cut", replicas if split.size is None and replicas <= split.stream_shards else 1
        )
        state.restore_generator_states(manifest["generators"])
        # With another global batch (allowed by --allow_config_change) the position stays where it was.
        self._skipped = manifest["consumed"] - step * plan.global_batch
        self.evaluation, self._saved_step = manifest.get("metrics", {}), -1 if "in_memory" in manifest else step
        kept = (
            self.stream_cut != self.job.stream_cut
            and f"{split.name} is read in {self.stream_cut} parts, as the run began, and all of it by every worker"
        )
        return [message for message in (warning, kept) if message]

    def rollback(self, step: int) -> tuple[list[str], int]:
        """From bad numbers before `step` back to the newest snapshot, and past all batches since then. A collective.

        Returns messages and the step to go on from. Raises DivergedError when that did not help often enough.
        """
        limit = self.config.loop.max_rollbacks
        if self._rollbacks == limit:
            raise DivergedError(
                f"Loss or gradients became NaN or infinite before step {step}, after {limit} rollbacks"
                f" (--max_rollbacks={limit}): lower --learning_rate or set --clip_norm."
            )
        self._rollbacks += 1
        position = self.position(step)
        if self.writer:
            self.writer.wait()
        messages, restored = self.restore(self.config.replace(resume="auto"))
        passed = position - self.position(restored)
        self._skipped += passed
        self._saved_step = (
            self._copied_step
        ) = -1  # the snapshot, and the copy, of this step lead back to the bad batches
        messages.append(
            f"NaN or infinite values before step {step}: went back to step {restored} and past {passed:,} samples,"
            f" which are not trained on (rollback {self._rollbacks} of {limit})"
        )
        return messages, restored

    # -- leaving ---------------------------------------------------------------------------------------------------

    def save(self, step: int) -> None:
        """A snapshot, unless there is one of this step. On all workers."""
        self.time_policy.saved()
        if step == self._saved_step:
            return
        self._saved_step = step
        self.settle_statistics()
        if self.is_copied:  # a snapshot of weights that differ would keep the damage
            check_weights(self.runtime, self.state.held(), f"at step {step}")
        arrays = (
            self.state.to_shards()
            if self.in_parts
            else self.state.to_host(wanted=self.chief, into=self.writer.recycled() if self.writer else None)
        )
        if self.writer:
            self.writer.save(step, arrays, self._manifest_fields(step))

    def copy(self, step: int, now: bool = False) -> None:
        """A copy in this worker's memory, if it is time for one, or `now`. On all workers."""
        if self._copied_step >= 0 and step - self._copied_step < (
            1 if now else max(1, self.config.checkpoint.elastic_commit_every)
        ):
            return
        self._copied_step = step
        self.settle_statistics()
        self.memory.copy = Copy(step, self.state.to_host(), {**self._manifest_fields(step), "step": step})

    def back_up(self, step: int) -> None:
        """A backup. On all workers."""
        self.settle_statistics()
        arrays = self.state.to_host(wanted=self.chief, into=self.backup.writer.recycled() if self.chief else None)
        if self.chief:
            self.backup.back_up(step, arrays, self._manifest_fields(step))

    def weights(self) -> dict[str, np.ndarray]:
        """key -> array of each of the model's variables, with the moving averages if there are any: on the chief.

        A collective.
        """
        with self.job.step.update.averaged():
            return self.state.to_host(wanted=self.chief, only="model/")

    def backup_period(self) -> int:
        """Steps between two backups; 0: none."""
        if self.backup is None:
            return 0
        size = self.job.train_split.size
        return self.config.checkpoint.backup_every or (math.ceil(size / self.job.plan.global_batch) if size else 0)

    def settle_statistics(self) -> None:
        """Moving statistics that are not synchronised drift apart: everyone takes the first's before they are used."""
        if self.config.model.sync_batchnorm or not self.is_copied:
            return
        variables = [
            variable.value for variable in self.job.model.non_trainable_variables if variable.dtype == "float32"
        ]
        for variable, value in zip(
            variables, self._of_the_first([variable.numpy() for variable in variables]), strict=True
        ):
            variable.assign(value)

    def _of_the_first(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """The chief's or, on another stage of a pipeline, which has what the chief has not, those of the first rank
        there. A collective.
        """
        first = self.state.first_of_stage()
        firsts = self.runtime.all_gather(np.array([first], np.int64))[:, 0]
        if not firsts.any():
            return self.runtime.broadcast(arrays)
        return [self.runtime.all_gather(array)[first] for array in arrays]

    def messages(self) -> Iterator[tuple[str, dict]]:
        """What the writers have to say: ("save", "backup" or "warning", values)."""
        if self.chief:
            yield from self.writer.messages()
        if self.backup:
            for kind, values in self.backup.writer.messages():
                quiet = {name: value for name, value in values.items() if name != "message"}  # there are many
                yield ("backup", quiet) if kind == "save" else (kind, values)

    def finish(self) -> str:
        """Waits for the last write. Returns why the last snapshot could not be written, or ""."""
        if self.writer is None:
            return ""
        self.writer.wait()
        return self.writer.last_failure

    def give_up(self) -> None:
        """After an error: what is being written gets the time to be committed."""
        if self.in_parts:
            self.store.give_up_at = time.monotonic() + _LAST_PART_SECONDS
        for writer in self._writers():
            with contextlib.suppress(Exception):
                writer.wait(_LAST_WRITE_SECONDS)

    def _writers(self) -> list[SnapshotWriter]:
        return [writer for writer in (self.writer, self.backup and self.backup.writer) if writer]

    def _manifest_fields(self, step: int) -> dict[str, Any]:
        return {
            "consumed": self.position(step),
            "stream_cut": self.stream_cut,
            "skipped_samples": self._skipped,
            "config_digest": self.config.digest(),
            "identity": self.config.identity(),
            "workers": self.runtime.size,
            "replicas": self.runtime.replicas,
            "strategy": self.runtime.name,
            "versions": {
                name: flags.metadata_version(name) or flags.metadata_version(f"{name}-cpu")
                for name in ("tensorflow", "keras", "numpy")
            },
            "variables": self.state.table(),
            "generators": state.generator_states(),
            "clock": self.clock.state(),
            "metrics": self.evaluation,
            "learning_rate": self.learning_rate(),
            "losses": self.losses.losses,
            "time": time.time(),
            "run_id": self.run_id,
        }


def _make_backup_folder(name: str) -> None:
    """Raises ConfigError if it cannot be made or written: each backup would fail, and nobody have noticed at the start."""
    if "://" in name:
        return
    try:
        os.makedirs(name, 0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=name):
            pass
    except OSError as error:
        raise ConfigError(
            f"--backup_dir={name} cannot be used ({error.strerror}): name a folder that can be written."
        ) from None
