"""A run from start to end: compose, restore, train, save, leave results. What `python -m tfdist.train` calls.

Every worker runs this; what only the chief does (the files that all share) is behind `rank == 0`.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NoReturn

from tfdist import build, flags
from tfdist.artifacts.status import read_status, write_status
from tfdist.config import Config, parse_profile_steps
from tfdist.control import lease
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import CheckpointError, ExitCode
from tfdist.run import results
from tfdist.run.agreement import broadcast_json, must_agree
from tfdist.run.diagnosis import Diagnosis
from tfdist.run.health import BETWEEN_STEPS, HealthMonitor
from tfdist.run.jit_tune import tuned
from tfdist.run.recovery import Memory, Recovery
from tfdist.runtime.weight_check import check_weights
from tfdist.telemetry.events import Event
from tfdist.telemetry.jsonl import next_attempt
from tfdist.telemetry.observers import build_observers
from tfdist.telemetry.timer import Clock, process_seconds
from tfdist.telemetry.trackers import Run
from tfdist.training.log_interval import Watch
from tfdist.training.loop import LoopHooks, TrainResult, train
from tfdist.training.model_rates import make_rates
from tfdist.training.requests import Requests
from tfdist.training.traced_schedule import TracedSchedule


class GroupChange(Exception):
    """All workers have left their group in order, so that another can be formed (elastic.py)."""


def run(
    config: Config, cluster: Cluster, command: str, memory: Memory | None = None, began: float | None = None
) -> ExitCode:
    """Trains as one worker of `cluster`; returns how it ended. Raises TfdistError subclasses with their sentence.

    memory: of a process that may be in several groups of workers, one after the other; then also raises GroupChange.
    began: since when peers have been waited for (time.monotonic()).
    """
    with (
        lease.held(build.run_folder(config), lease.job_identity(os.environ, cluster))
        if cluster.is_chief
        else contextlib.nullcontext()
    ):
        return _run(config, cluster, command, memory, began)


def _run(config: Config, cluster: Cluster, command: str, memory: Memory | None, began: float | None) -> ExitCode:
    monitor = HealthMonitor(config, cluster, memory.signals if memory else None)
    session = None
    try:
        session = Session(config, cluster, command, monitor, memory, began)
        return session.run()
    except GroupChange:
        raise
    except Exception as error:
        found = monitor.failed(error)
        if session:
            session.give_up(found)
        if memory:  # the process goes on; else it is watched to its end
            monitor.close()
        if found is error:
            raise
        raise found from error


class Session:
    """The state of one worker's run beyond the job itself."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        command: str,
        monitor: HealthMonitor,
        memory: Memory | None = None,
        began: float | None = None,
    ):
        started, imported_s = time.monotonic(), process_seconds()
        self.monitor, self.memory = monitor, memory
        self.folder = build.run_folder(config)
        runtime = build.start_runtime(config, cluster, began)
        # After the runtime: TensorFlow's coordination service takes SIGTERM for itself when it starts.
        self.signals = monitor.signals()
        monitor.connect(runtime)
        # Before the data: other flags may mean other data, and again when all of them are known.
        must_agree(runtime, "configuration", config.digest(), "give all workers the same flags")
        limits = build.memory_limits(cluster)
        config, xla = tuned(config, runtime, self.folder, limits) if config.model.jit_tune else (config, "")
        self.job = build.compose(config, runtime, limits)
        self.config, self.runtime = self.job.config, self.job.runtime
        self.chief = self.runtime.rank == 0
        self.clock = Clock()
        self.watch = Watch(
            self.clock,
            self.runtime.rank,
            self.runtime.all_gather,
            self.job.step.splits,
            config.cluster.straggler_factor,
        )
        self._agree_on_configuration()
        self.recovery = Recovery(self.job, self.folder, self.clock, monitor.faults, memory)
        restoring = time.monotonic()
        with monitor.watchdog.section("restore"):
            messages, self.first_step = self.recovery.restore(copy=memory.copy if memory else None)
        restored = time.monotonic()
        check_weights(self.runtime, self.recovery.state.held(), "at the start")
        self.diagnosis = Diagnosis(
            self.job,
            self.recovery,
            self.first_step,
            lambda message: self.observer(Event("warning", int(self.job.step.counter.numpy()), {"message": message})),
        )
        self.run_id, self.attempt = self._identify()
        self.recovery.run_id = self.run_id
        size = self.job.train_split.size
        self.observer = build_observers(
            self.config.telemetry,
            Run(
                self.folder,
                self.run_id,
                self.attempt,
                self.first_step,
                self.runtime.rank,
                cluster.local_rank,
                self.config.flat(),
                weights=lambda: {variable.path: variable.numpy() for variable in self.job.model.trainable_variables},
                step=lambda: int(self.job.step.counter.numpy()),
            ),
            total_steps=self.config.run.steps,
            steps_per_epoch=size / self.job.plan.global_batch if size else None,
        )
        if self.chief:
            flags.write_flagfile(self.config, self.folder / flags.FLAGS_FILE, command)
            write_status(self.folder, "running", self.run_id)
        self.observer(
            Event(
                "start",
                self.first_step,
                {
                    "message": (
                        f"{cluster.describe()}; {self.runtime.name}; {self.job.plan.describe()};"
                        f" {self.job.model.count_params():,} parameters; run folder {self.folder}{xla and '; '}{xla}"
                    ),
                    "parameters": self.job.model.count_params(),
                    "config_digest": self.config.digest(),
                    "replicas": self.runtime.replicas,
                    "workers": self.runtime.size,
                    "import_s": imported_s,
                    "build_s": restoring - started,
                    "restore_s": restored - restoring,
                    "startup_s": process_seconds(),
                    "flags": (self.folder / flags.FLAGS_FILE).read_text() if self.chief else "",
                    **results.source_info(self.job),
                },
            )
        )
        for message in messages:
            self.observer(Event("restore", self.first_step, {"message": message}))
        for message in self.job.warnings:
            self.observer(Event("warning", self.first_step, {"message": message}))

    def _agree_on_configuration(self) -> None:
        """Workers with different flags would train different models, on each other's gradients."""
        must_agree(self.runtime, "configuration", self.config.digest(), "give all workers the same flags")

    def _identify(self) -> tuple[str, int]:
        """(run id, attempt): one id over all restarts and ranks."""
        identity = {}
        if self.chief:
            log = self.folder / "logs" / "rank-0.jsonl"
            previous = read_status(self.folder).get("run_id")
            identity = {"run_id": previous or uuid.uuid4().hex[:12], "attempt": next_attempt(log)}
        identity = broadcast_json(self.runtime, identity)
        return identity["run_id"], identity["attempt"]

    # -- train -----------------------------------------------------------------------------------------------------

    def run(self) -> ExitCode:
        loop, checkpoint, recovery = self.config.loop, self.config.checkpoint, self.recovery
        evaluator = self.job.evaluator()
        if loop.on_nan == "rollback" and self.first_step == 0:
            recovery.save(0)  # so that there is something to go back to
        parts = LoopHooks(
            step=self.job.step,
            iterators=(
                self.job.iterators(recovery.position(self.first_step), recovery.stream_cut)
                if self.first_step < self.config.run.steps
                else []
            ),
            schedule=TracedSchedule(
                self.config.run.steps,
                loop.log_every,
                loop.eval_every,
                checkpoint.save_every,
                recovery.backup_period(),
                loop.steps_per_loop,
                bool(checkpoint.keep_best),
                traced=parse_profile_steps(self.config.telemetry.profile_steps),
            ),
            global_batch=self.job.plan.global_batch,
            position=recovery.position,
            clock=self.clock,
            observer=self._observe,
            told=lambda: {"train/learning_rate": recovery.learning_rate(), **self.job.step.update.figures()},
            evaluate=(lambda: self._evaluate(evaluator)) if evaluator else None,
            save=recovery.save,
            backup=recovery.back_up,
            requests=self._requests,
            section=self._section,
            rollback=self._rollback if loop.on_nan == "rollback" else None,
            rates=make_rates(self.config, self.runtime, self.job.model, self.job.train_split),
            watch=self.watch,
        )
        self.monitor.watchdog.enter(BETWEEN_STEPS)
        with self.diagnosis.naming():
            ending = train(parts, self.first_step)
        if ending.left:
            self._leave(ending.step)
        return self._finish(ending)

    @contextlib.contextmanager
    def _section(self, name: str) -> Iterator[None]:
        """What this worker is doing: for the watchdog, and for observers that follow it."""
        with self.monitor.watchdog.section(name), self.observer.section(name):
            yield

    def _evaluate(self, evaluator) -> dict[str, float]:
        self.recovery.settle_statistics()
        with self.diagnosis.naming(evaluated=True):
            found = self.recovery.evaluation = evaluator()
        self.diagnosis.evaluated(found)
        return found

    def _observe(self, event: Event) -> None:
        self.observer(event)
        if event.kind == "train":
            self.diagnosis.observed(event)
        if event.kind == "train" and (sentence := self.recovery.losses.add(event.values["train/loss"])):
            self.observer(Event("warning", event.step, {"message": sentence}))

    def _rollback(self, step: int) -> tuple[int, list]:
        found = self.diagnosis.flaws()
        messages, restored = self.recovery.rollback(step)
        for message in filter(None, [*messages, found]):
            self.observer(Event("warning", restored, {"message": message}))
        return restored, self.job.iterators(self.recovery.position(restored), self.recovery.stream_cut)

    def _requests(self, step: int) -> Requests:
        """What this worker asks for; also tells what the writers have to say, and keeps a copy if it may be needed."""
        self.monitor.faults.at("step", step)
        self.diagnosis.called_at = step
        self._tell_of_saves(step)
        save, self.signals.save = self.signals.save or (self.chief and self.recovery.time_policy.due()), False
        if self.memory is None:
            return Requests(save, self.signals.stop)
        self.recovery.copy(step)
        return Requests(save, self.signals.stop, self.memory.member.leave)

    def _tell_of_saves(self, step: int) -> None:
        for kind, values in self.recovery.messages():
            self.observer(Event(kind, step, values))

    # -- end -------------------------------------------------------------------------------------------------------

    def _finish(self, ending: TrainResult) -> ExitCode:
        with self._section("save"):
            if self.config.checkpoint.save_final and not ending.stopped:
                self.recovery.save(ending.step)
            unwritten = self.recovery.finish()
            self._tell_of_saves(ending.step)
            verdict = self.watch.verdicts.final()
            if self.chief and verdict:
                self.observer(Event("verdict", ending.step, {"message": verdict, "final": True}))
            weights = {} if ending.stopped or self.config.export.export == "none" else self.recovery.weights()
            if not ending.stopped and self.chief:
                results.leave_results(
                    self.job, weights, self.folder, self.observer, ending.step, self._summary(ending, verdict)
                )
                write_status(self.folder, "finished", self.run_id)
            self.observer(
                Event(
                    "end",
                    ending.step,
                    {
                        "stopped": ending.stopped,
                        "train_s": self.clock.seconds,
                        **{f"eval/{name}": value for name, value in ending.evaluation.items()},
                    },
                )
            )
            self.runtime.barrier()
        if self.recovery.backup and not ending.stopped and not unwritten:
            self.recovery.backup.delete()
        self.observer.close()
        self.monitor.close()
        self.runtime.close()
        if unwritten:
            raise CheckpointError(
                f"The last snapshot could not be written ({unwritten}): free or repair {self.recovery.store.directory},"
                " then start again to go on from the one before."
            )
        return ExitCode.PREEMPTED if ending.stopped else ExitCode.OK

    def _leave(self, step: int) -> NoReturn:
        """Out of the group, in order and together with all others; the process goes on. Raises GroupChange."""
        with self._section("save"):
            self.recovery.copy(step, now=True)
            self.recovery.finish()
            self._tell_of_saves(step)
            self.observer(Event("regroup", step, {"message": f"another group of workers is formed at step {step}"}))
            self.runtime.barrier()
        self.observer.close()
        self.monitor.close()
        self.runtime.close()
        raise GroupChange(f"step {step}")

    def _summary(self, ending: TrainResult, verdict: str) -> dict[str, Any]:
        samples, losses = ending.step * self.job.plan.global_batch, self.recovery.losses.losses
        return {
            "steps": ending.step,
            "workers": self.runtime.size,
            "samples": samples,
            "attempts": self.attempt + 1,
            "train_s": self.clock.seconds,
            "samples_per_s": samples / max(self.clock.seconds, 1e-9),
            "pauses_s": dict(self.clock.pauses),
            **({"train/loss": losses[-1]} if losses else {}),
            **{f"eval/{name}": value for name, value in ending.evaluation.items()},
            "verdict": verdict,
            "snapshots": asdict(self.recovery.writer.stats),
        }

    def give_up(self, error: BaseException) -> None:
        """After an error: what can still be saved is saved, and every tracker writes what it holds."""
        self.recovery.give_up()
        with contextlib.suppress(Exception):
            self.observer(
                Event("error", int(self.job.step.counter.numpy()), {"message": f"{type(error).__name__}: {error}"})
            )
            self.observer.close()
