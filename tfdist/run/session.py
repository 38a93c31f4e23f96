"""A run from start to end: compose, restore, train, save, write results. `python -m tfdist.train` calls this.

Every worker runs this; actions of the chief alone (on files that all share) are behind `rank == 0`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from tfdist import build, flags
from tfdist.artifacts.run_folder import run_folder, written
from tfdist.artifacts.status import note_failure, write_status
from tfdist.build import Job
from tfdist.config import Config, parse_profile_steps
from tfdist.control import lease, sections
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import CheckpointError, ConfigError, ExitCode
from tfdist.control.signals import SignalRequests
from tfdist.run import results
from tfdist.run.agreement import RunIdentity, check_same_identity, check_same_options, identify
from tfdist.run.announcement import Announcement
from tfdist.run.bad_samples import BadSamples
from tfdist.run.health import HealthMonitor
from tfdist.run.in_memory_checkpoint import WorkerMemory, has_state
from tfdist.run.jit_tune import tuned
from tfdist.run.open_resources import OpenResources
from tfdist.run.recovery import Recovery
from tfdist.run.remote_run import RemoteRun, remote_run
from tfdist.run.session_hooks import SessionHooks
from tfdist.run.trainer import LocalTrainer, Trainer, TrainerInputs, shown_weights
from tfdist.runtime.base import Runtime
from tfdist.runtime.weight_check import check_weights
from tfdist.telemetry.events import Event, FanOut
from tfdist.telemetry.observers import build_observers
from tfdist.telemetry.timer import Clock
from tfdist.telemetry.trackers import Run
from tfdist.training.loop import TrainResult, train
from tfdist.training.loop_hooks import LoopSchedule


class GroupChange(Exception):
    """All workers of an elastic job (elastic.py) have left their group in order, so that another can be formed."""


@dataclass(frozen=True)
class Start:
    """The facts with which a worker begins a run.

    memory: of a process that may be in several groups of workers, one after another.
    began: since when peers have been awaited (time.monotonic()).
    watched: whom the health monitor watches; None: the cluster.
    """

    config: Config
    cluster: Cluster
    command: str
    memory: WorkerMemory | None = None
    began: float | None = None
    watched: Cluster | None = None
    make_trainer: Callable[[TrainerInputs], Trainer] = LocalTrainer


def run(start: Start) -> ExitCode:
    """Trains as one worker of a cluster; returns how it ended. Raises TfdistError subclasses with their sentence; and
    GroupChange, in a process with a memory.
    """
    config, cluster, folder = start.config, start.cluster, run_folder(start.config)
    job = lease.job_identity(os.environ, cluster)
    with contextlib.ExitStack() as held:
        if cluster.is_chief:
            name = f"--run_dir={config.run.run_dir}"
            held.enter_context(lease.held(folder, job, name, has_state(start.memory)))
        return Session(start, held.enter_context(remote_run(config.run, folder, cluster, job))).run()


class Session:
    """One worker's run. Nothing is opened before `run`, and nothing is open after it."""

    # Set by the phases of `run`.
    monitor: HealthMonitor
    runtime: Runtime
    signals: SignalRequests
    job: Job
    config: Config  # resolved
    chief: bool
    bad_samples: BadSamples
    recovery: Recovery
    first_step: int
    identity: RunIdentity
    observer: FanOut
    trainer = Trainer()  # until it is made
    hooks: SessionHooks

    def __init__(self, start: Start, remote: RemoteRun | None):
        self.start, self.memory, self.config, self.remote = start, start.memory, start.config, remote
        self.folder, self.announcement = run_folder(start.config), Announcement(self.memory)
        self.clock, self.resources = Clock(), OpenResources()
        self._all_leave = False  # this worker ends together with the others

    def run(self) -> ExitCode:
        """Runs the session from start to end, see the function `run`."""
        watched = self.start.cluster if self.start.watched is None else self.start.watched
        monitor = self.monitor = HealthMonitor(self.config, watched, self.memory.signals if self.memory else None)
        try:
            self._start_runtime()
            self._compose()
            self._restore()
            self._observe()
            self._make_trainer()
            result = self._train()
            if result.left and self.memory:
                self._leave(result.step, self.memory)
            return self._finish(result)
        except GroupChange:
            raise
        except Exception as error:
            found = monitor.failed(error)
            self.resources.fail(found)
            if found is error:
                raise
            raise found from error
        finally:
            self.resources.close()
            monitor.close()

    # -- phases ----------------------------------------------------------------------------------------------------

    def _start_runtime(self) -> None:
        self.runtime = build.start_runtime(self.config, self.start.cluster, self.start.began)
        self.resources.callback(self._close_runtime)
        self.resources.callback(self.monitor.close)  # before the runtime: that may wait for the others for a while
        # After the runtime: a worker that waits for others in vain ends at once on a signal; there is nothing to save.
        self.signals = self.monitor.signals()
        self.monitor.connect(self.runtime)

    def _compose(self) -> None:
        config, cluster = self.start.config, self.start.cluster
        check_same_options(self.runtime, config)
        # Before the data, since other flags may mean other data; and again when all options are resolved.
        check_same_identity(self.runtime, config)
        limits = build.memory_limits(cluster)
        if config.model.jit_tune:
            config, self.announcement.xla = tuned(config, self.runtime, self.folder, limits)
        self.job = results.exportable(build.compose(config, self.runtime, limits))
        self.config, self.runtime = self.job.config, self.job.runtime
        self.chief = self.runtime.rank == 0
        check_same_identity(self.runtime, self.config)

    def _restore(self) -> None:
        self.recovery = Recovery(self.job, self.folder, self.clock, self.monitor.faults, self.memory, self.remote)
        self.resources.on_failure(lambda error: self.recovery.files.give_up())
        self.resources.afterwards(self.recovery.files.close)
        self.announcement.built()
        with self.monitor.watchdog.section(sections.RESTORE):
            messages, self.first_step = self.recovery.restore(checkpoint=self.memory and self.memory.checkpoint)
        self.announcement.restored(messages)
        self.recovery.check_epochs(self.start.config.run, self.first_step)
        check_weights(self.runtime, self.recovery.state.held(), "at the start")
        self.identity = identify(self.runtime, self.folder)
        self.recovery.run_id = self.identity.run_id

    def _observe(self) -> None:
        identity = self.identity
        if self.remote:
            self.remote.bring_own(identity.run_id)
        run = Run(
            self.folder,
            identity.run_id,
            identity.attempt,
            self.first_step,
            self.runtime.rank,
            self.start.cluster.local_rank,
            self.config.flat(),
            weights=lambda: shown_weights(self.job, self.trainer),
            step=self._counter,
        )
        epochs, steps, may_fail = self.recovery.progress.epochs, self.config.run.steps, has_state(self.memory)
        self.observer = build_observers(
            self.config.telemetry, run, total_steps=steps, epoch_at=epochs, may_fail=may_fail
        )
        self.resources.callback(self.observer.close)
        self.resources.on_failure(self._report_failure)
        self.bad_samples = BadSamples(
            self.job,
            self.recovery,
            self.first_step,
            lambda message: self.observer(Event("warning", self._counter(), {"message": message})),
        )
        if self.chief:
            # After a regroup both are there, and the disk may be full.
            unneeded = (ConfigError, CheckpointError) if has_state(self.memory) else ()
            with contextlib.suppress(*unneeded), written(self.config):
                flags.write_flagfile(self.config, self.folder / flags.FLAGS_FILE, self.start.command)
                write_status(self.folder, "running", identity.run_id, identity.attempt)
            self.resources.on_failure(lambda error: note_failure(self.folder, error, identity.run_id, identity.attempt))
        if self.remote:
            self.remote.start()
        for event in self.announcement.events(self.start.cluster, self.job, self.folder, self.first_step):
            self.observer(event)

    def _make_trainer(self) -> None:
        loop, checkpoint = self.config.loop, self.config.checkpoint
        schedule = LoopSchedule(
            self.config.run.steps,
            loop.log_every,
            loop.eval_every,
            checkpoint.save_every,
            self.recovery.backup_period(),
            loop.steps_per_loop,
            bool(checkpoint.keep_best),
            parse_profile_steps(self.config.telemetry.profile_steps),
        )
        self.trainer = self.start.make_trainer(
            TrainerInputs(
                self.job, self.first_step, schedule, self.recovery.progress.consumed, self.clock, self.observer
            )
        )
        self.resources.callback(self.trainer.close)
        self.monitor.explain_with(self.trainer.cause)
        self.hooks = SessionHooks(
            self.recovery, self.trainer, self.bad_samples, self.observer, self.monitor, self.signals, self.memory
        )

    def _train(self) -> TrainResult:
        if self.config.loop.on_nan == "rollback" and self.first_step == 0:
            self.recovery.save(0)  # so that a rollback is possible
        hooks = self.hooks.for_loop(self.first_step)
        self.monitor.watchdog.enter(sections.BETWEEN_STEPS)
        with self.bad_samples.naming():
            return train(hooks, self.first_step)

    # -- end -------------------------------------------------------------------------------------------------------

    def _finish(self, result: TrainResult) -> ExitCode:
        with self.hooks.section(sections.SAVE):
            if self.config.checkpoint.save_final and not result.stopped:
                self.hooks.save(result.step)
            unwritten = self.hooks.finish_saves(result.step)
            verdict = self.trainer.watch.verdicts.final() if self.trainer.watch else ""
            if self.chief and verdict:
                self.observer(Event("verdict", result.step, {"message": verdict, "final": True}))
            if not result.stopped:
                self._leave_results(result, verdict, unwritten)
            evaluation = {f"eval/{name}": value for name, value in result.evaluation.items()}
            ended = {"stopped": result.stopped, "train_s": self.clock.seconds, **evaluation}
            self.observer(Event("end", result.step, ended))
            self.runtime.barrier()
        if not unwritten:
            self.monitor.all_saved()
        self.recovery.files.end_backup(finished=not result.stopped and not unwritten)
        self._close_together()
        if unwritten:
            raise CheckpointError(
                f"The last snapshot could not be written ({unwritten}): free or repair"
                f" {self.recovery.files.store.directory}, then start again to resume from the one before."
            )
        return ExitCode.PREEMPTED if result.stopped else ExitCode.OK

    def _leave_results(self, result: TrainResult, verdict: str, unwritten: str) -> None:
        self.hooks.pull_state(result.step)  # no evaluation and no save may have done it
        weights = {} if self.config.export.export == "none" else self.recovery.weights()
        if not self.chief:
            return
        figures = results.Figures(result, verdict, self.identity.attempt + 1, self.clock, self.trainer.summary())
        values = results.run_summary(self.job, self.recovery, figures)
        results.leave_results(self.job, weights, self.folder, self.observer, result.step, values, unwritten)
        if not unwritten:
            write_status(self.folder, "finished", self.identity.run_id, self.identity.attempt)

    def _leave(self, step: int, memory: WorkerMemory) -> NoReturn:
        """Leaves the group in order, together with all others; the process continues. Raises GroupChange."""
        with self.hooks.section(sections.SAVE):
            self.recovery.copy(step, memory, now=True)
            self.recovery.files.finish()
            self.hooks.report_saves(step)
            self.observer(Event("regroup", step, {"message": f"a new group of workers is formed at step {step}"}))
            self.runtime.barrier()
        self._close_together()
        raise GroupChange(f"step {step}")

    def _counter(self) -> int:
        return int(self.job.step.counter.numpy())

    def _close_together(self) -> None:
        self._all_leave = True
        self.resources.close()

    def _close_runtime(self) -> None:
        """Closes the runtime, but not after an error: others may be gone or stuck, and ending the process is enough. An
        elastic worker does not end: while its runtime is open, the others would wait for it."""
        if self._all_leave or self.runtime.size == 1 or self.memory:
            self.runtime.close()

    def _report_failure(self, error: BaseException) -> None:
        self.observer(Event("error", self._counter(), {"message": f"{type(error).__name__}: {error}"}))
