"""A run from start to end: compose, restore, train, save, export, sum up. What `python -m tfdist.train` calls.

Every worker runs this; what only the chief does (the files that all share) is behind `rank == 0`.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
import zlib
from dataclasses import asdict
from typing import Any

import keras
import numpy as np

from tfdist import build, flags
from tfdist.artifacts import restore, state
from tfdist.artifacts.export import export_model
from tfdist.artifacts.policy import Retention, TimePolicy
from tfdist.artifacts.status import read_status, write_status
from tfdist.artifacts.store import SnapshotStore
from tfdist.artifacts.writer import SnapshotWriter
from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import CheckpointError, ConfigError, ExitCode
from tfdist.control.signals import SignalRequests
from tfdist.models.registry import build_model
from tfdist.runtime.errors import explain
from tfdist.telemetry import plot, summary
from tfdist.telemetry.build import build_observers
from tfdist.telemetry.events import Event
from tfdist.telemetry.jsonl import next_attempt
from tfdist.telemetry.timer import Clock
from tfdist.training.loop import Ending, Parts, Rhythm, train
from tfdist.training.optimizer import ema_variables


def run(config: Config, cluster: Cluster, command: str) -> ExitCode:
    """Trains as one worker of `cluster`; returns how it ended. Raises TfdistError subclasses with their sentence."""
    try:
        return Session(config, cluster, command).run()
    except Exception as error:
        sentence = explain(error, cluster)
        if sentence is None:
            raise
        raise sentence from error


class Session:
    """The state of one worker's run beyond the job itself."""

    def __init__(self, config: Config, cluster: Cluster, command: str):
        started = time.monotonic()
        self.folder = build.run_folder(config)
        runtime = build.start_runtime(config, cluster)
        # After the runtime: TensorFlow's coordination service takes SIGTERM for itself when it starts.
        self.signals = SignalRequests().install()
        self.job = build.compose(config, runtime)
        self.config, self.runtime = self.job.config, self.job.runtime
        self.chief = self.runtime.rank == 0
        self.variables = state.collect(self.job.model, self.job.optimizer, self.job.step.variables)
        self.clock = Clock()
        self.evaluation: dict[str, float] = {}
        self._agree_on_configuration()
        checkpoint = self.config.checkpoint
        self.store = SnapshotStore(str(self.folder / "checkpoints"))
        self.writer = SnapshotWriter(self.store, Retention(checkpoint.keep, checkpoint.keep_every, checkpoint.keep_best), asynchronous=checkpoint.async_save) if self.chief else None
        self.time_policy = TimePolicy(checkpoint.save_minutes)
        self.saved_step = -1
        messages, self.first_step = self._restore()
        self._check_weights_agree()
        self.run_id, self.attempt = self._identify()
        self.observer = build_observers(
            self.config.telemetry, run_dir=self.folder, rank=self.runtime.rank, total_steps=self.config.run.steps, steps_per_epoch=self._steps_per_epoch(),
            run_id=self.run_id, attempt=self.attempt, resumed_step=self.first_step)
        if self.chief:
            flags.write_flagfile(self.config, self.folder / flags.FLAGS_FILE, command)
            write_status(self.folder, "running", self.run_id)
        self.observer(Event("start", self.first_step, {
            "message": f"{cluster.describe()}; {self.runtime.name}; {self.job.plan.describe()}; {self.job.model.count_params():,} parameters; run folder {self.folder}",
            "parameters": self.job.model.count_params(), "config_digest": self.config.digest(), "replicas": self.runtime.replicas, "workers": self.runtime.size,
            "startup_s": time.monotonic() - started, "flags": (self.folder / flags.FLAGS_FILE).read_text() if self.chief else "", **self._split_info()}))
        for message in messages:
            self.observer(Event("restore", self.first_step, {"message": message}))

    # -- start -----------------------------------------------------------------------------------------------------

    def _agree_on_configuration(self) -> None:
        """Workers with different flags would train different models, on each other's gradients; those with different
        data would take samples twice and leave others out."""
        self._must_agree("configuration", self.config.digest(), "give all workers the same flags")
        for split in filter(None, (self.job.train_split, self.job.eval_split)):
            identity = hashlib.sha256(f"{split.size} {split.info.get('digest', '')}".encode()).hexdigest()[:16]
            self._must_agree(f"{split.name} data", identity, "give all workers the same files and package versions")

    def _must_agree(self, what: str, identity: str, fix: str) -> None:
        """Raises ConfigError on all workers unless `identity` (16 characters) is the same on all."""
        found = [row.tobytes().decode() for row in self.runtime.all_gather(np.frombuffer(identity.encode(), np.uint8))]
        for rank, other in enumerate(found):
            if other != found[0]:
                raise ConfigError(f"Rank {rank} has {what} {other}, rank 0 has {found[0]}: {fix}.")

    def _restore(self) -> tuple[list[str], int]:
        """Restores from the chief's choice, or leaves the initial state. Returns messages and the step to go on from."""
        message: dict[str, Any] = {}
        arrays = None
        if self.chief:
            try:
                self.store.clean()
                snapshot, messages = restore.choose(self.store, self.config)
                message = {"messages": messages, "manifest": dict(snapshot.manifest) if snapshot else None}
                if snapshot:
                    arrays = self.store.read(snapshot)
                    state.check(self.variables, {key: (array.shape, str(array.dtype)) for key, array in arrays.items()})
                    message["messages"].append(_resumed(snapshot.path, snapshot.manifest, self.runtime.size))
            except CheckpointError as error:
                message = {"error": str(error)}  # all must end, and say why
        message = self._broadcast_json(message)
        if "error" in message:
            raise CheckpointError(message["error"])
        manifest = message["manifest"]
        if manifest is None:
            return message["messages"], 0
        if arrays is None:
            arrays = {key: np.zeros(shape, dtype) for key, (_, shape, dtype) in state.table(self.variables).items()}
        keys = sorted(arrays)
        state.assign(self.variables, dict(zip(keys, self.runtime.broadcast([arrays[key] for key in keys]), strict=True)))
        step = int(self.job.step.counter.numpy())
        restore.check_consistency(manifest, step, self.job.plan.global_batch)
        self.clock.restore(manifest["clock"])
        state.restore_generator_states(manifest["generators"])
        self.evaluation, self.saved_step = manifest.get("metrics", {}), step
        return message["messages"], step

    def _broadcast_json(self, value: dict) -> dict:
        data = np.frombuffer(json.dumps(value).encode(), np.uint8)
        length = int(self.runtime.all_gather(np.array([data.size], np.int64))[0, 0])
        (data,) = self.runtime.broadcast([data if self.chief else np.zeros(length, np.uint8)])
        return json.loads(data.tobytes())

    def _check_weights_agree(self) -> None:
        """All ranks must start from the same bits; a difference would never go away."""
        checksum = 0
        for array in state.to_host({key: self.variables[key] for key in self.variables if key.startswith("model/")}).values():
            checksum = zlib.crc32(np.ascontiguousarray(array).tobytes(), checksum)
        checksums = self.runtime.all_gather(np.array([checksum], np.uint32))[:, 0]
        different = [str(rank) for rank, other in enumerate(checksums) if other != checksums[0]]
        if different:
            raise ConfigError(f"The weights of rank {', '.join(different)} differ from the chief's at the start: the model must be built in the same way on all workers (no per-worker randomness, the same package versions).")

    def _identify(self) -> tuple[str, int]:
        """(run id, attempt): one id over all restarts and ranks."""
        identity = {}
        if self.chief:
            log = self.folder / "logs" / "rank-0.jsonl"
            previous = read_status(self.folder).get("run_id")
            identity = {"run_id": previous or uuid.uuid4().hex[:12], "attempt": next_attempt(log)}
        identity = self._broadcast_json(identity)
        return identity["run_id"], identity["attempt"]

    def _steps_per_epoch(self) -> float | None:
        size = self.job.train_split.size
        return size / self.job.plan.global_batch if size else None

    def _split_info(self) -> dict[str, Any]:
        """What the sources tell about themselves (sizes, entropies, ...), as event values."""
        values: dict[str, Any] = {"data/train_samples": self.job.train_split.size}
        if self.job.eval_split:
            values["data/eval_samples"] = self.job.eval_split.size
            values |= {f"data/{name}": value for name, value in self.job.eval_split.info.items() if isinstance(value, (int, float, str))}
        return values

    # -- train -----------------------------------------------------------------------------------------------------

    def run(self) -> ExitCode:
        loop, checkpoint = self.config.loop, self.config.checkpoint
        evaluator = self.job.evaluator()
        parts = Parts(
            step=self.job.step,
            iterators=self.job.iterators(self.first_step * self.job.plan.global_batch) if self.first_step < self.config.run.steps else [],
            rhythm=Rhythm(self.config.run.steps, loop.log_every, loop.eval_every, checkpoint.save_every, loop.steps_per_loop, bool(checkpoint.keep_best)),
            global_batch=self.job.plan.global_batch, clock=self.clock, observer=self.observer,
            learning_rate=lambda: float(self.job.schedule(self.job.optimizer.iterations.value)),
            evaluate=(lambda: self._evaluate(evaluator)) if evaluator else None,
            save=self._save, requests=self._requests)
        ending = train(parts, self.first_step)
        return self._finish(ending)

    def _evaluate(self, evaluator) -> dict[str, float]:
        self._settle_statistics()
        self.evaluation = evaluator()
        return self.evaluation

    def _settle_statistics(self) -> None:
        """Moving statistics that are not synchronised drift apart: everyone takes the chief's before they are used."""
        if self.config.model.sync_batchnorm or self.runtime.size == 1:
            return
        variables = [variable.value for variable in self.job.model.non_trainable_variables if variable.dtype == "float32"]
        for variable, value in zip(variables, self.runtime.broadcast([variable.numpy() for variable in variables]), strict=True):
            variable.assign(value)

    def _requests(self, step: int) -> tuple[bool, bool]:
        """(save, stop) that this worker asks for; also tells what the writer has to say."""
        if self.writer:
            for kind, values in self.writer.messages():
                self.observer(Event(kind, step, values))
        save, self.signals.save = self.signals.save or (self.chief and self.time_policy.due()), False
        return save, self.signals.stop

    def _save(self, step: int) -> None:
        self.time_policy.saved()
        if step == self.saved_step:
            return
        self.saved_step = step
        self._settle_statistics()
        if self.writer:
            self.writer.save(step, state.to_host(self.variables), self._manifest_fields(step))

    def _manifest_fields(self, step: int) -> dict[str, Any]:
        return {
            "consumed": step * self.job.plan.global_batch, "config_digest": self.config.digest(), "identity": self.config.identity(),
            "workers": self.runtime.size, "replicas": self.runtime.replicas, "strategy": self.runtime.name,
            "versions": {name: flags.metadata_version(name) or flags.metadata_version(f"{name}-cpu") for name in ("tensorflow", "keras", "numpy")},
            "variables": state.table(self.variables), "generators": state.generator_states(), "clock": self.clock.state(),
            "metrics": self.evaluation, "time": time.time(), "run_id": self.run_id,
        }

    # -- end -------------------------------------------------------------------------------------------------------

    def _finish(self, ending: Ending) -> ExitCode:
        if self.config.checkpoint.save_final and not ending.stopped:
            self._save(ending.step)
        unwritten = ""
        if self.writer:
            self.writer.wait()
            self._requests(ending.step)
            unwritten = self.writer.last_failure
        if not ending.stopped and self.chief:
            self._leave_results(ending)
        self.observer(Event("end", ending.step, {"stopped": ending.stopped, "train_s": self.clock.seconds, **{f"eval/{name}": value for name, value in ending.evaluation.items()}}))
        self.runtime.barrier()
        self.observer.close()
        self.runtime.close()
        if unwritten:
            raise CheckpointError(f"The last snapshot could not be written ({unwritten}): free or repair {self.store.directory}, then start again to go on from the one before.")
        return ExitCode.PREEMPTED if ending.stopped else ExitCode.OK

    def _leave_results(self, ending: Ending) -> None:
        """Exports, plot and summary; chief only."""
        formats = tuple(form for form in self.config.export.export.split(",") if form != "none")
        if formats:
            try:
                export_model(self._plain_model(), self.folder / "export", formats)
            except OSError as error:
                raise CheckpointError(f"The model could not be exported to {self.folder / 'export'} ({error}): free or repair it, then start again; the training itself is saved.") from None
        info = self._split_info()
        entropy = info.get("data/eval_unigram_entropy_nats")
        log = self.folder / "logs" / "rank-0.jsonl"
        if self.config.telemetry.plot:
            plot.draw_curves(log, self.folder / "curves.png", {"byte-unigram entropy": entropy} if entropy else None)
        values = {
            "run_dir": str(self.folder), "steps": ending.step, "workers": self.runtime.size, "parameters": self.job.model.count_params(),
            "global_batch": self.job.plan.global_batch, "samples": ending.step * self.job.plan.global_batch, "train_s": self.clock.seconds,
            "samples_per_s": (ending.step * self.job.plan.global_batch) / max(self.clock.seconds, 1e-9), "pauses_s": dict(self.clock.pauses),
            **{f"eval/{name}": value for name, value in ending.evaluation.items()}, **info,
            "snapshots": asdict(self.writer.stats), "log": str(log), "tensorboard": f"tensorboard --logdir={self.folder / 'tensorboard'}",
            "checkpoints": str(self.folder / "checkpoints"), "export": str(self.folder / "export") if formats else "", "curves": str(self.folder / "curves.png") if self.config.telemetry.plot else "",
        }
        summary.write_summary(self.folder / "summary.json", values)
        summary.print_summary(values)
        write_status(self.folder, "finished", self.run_id)

    def _plain_model(self) -> keras.Model:
        """A copy of the model outside of any strategy, with the weights that evaluation used (the moving average, if any)."""
        keras.utils.set_random_seed(self.config.run.seed)
        copy = build_model(self.config.model, self.job.train_split.element_spec[0], self.job.train_split.num_classes)
        copy.set_weights(self.job.model.get_weights())
        for variable, average in zip(copy.trainable_variables, ema_variables(self.job.optimizer), strict=False):
            variable.assign(average.numpy())
        return copy


def _resumed(path: str, manifest: dict, workers: int) -> str:
    change = f", written by {manifest['workers']} workers, now {workers}" if manifest["workers"] != workers else ""
    return f"resumed from {path}: step {manifest['step']}, {manifest['consumed']:,} samples consumed{change}"
