"""The functions that the loop calls while a session trains: the session's side of `LoopHooks`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tfdist.artifacts import restore
from tfdist.config.run_options import CheckpointConfig
from tfdist.control.signals import SignalRequests
from tfdist.run.bad_samples import BadSamples
from tfdist.run.health import HealthMonitor
from tfdist.run.in_memory_checkpoint import WorkerMemory
from tfdist.run.recovery import Recovery
from tfdist.run.trainer import Trainer
from tfdist.runtime.decisions import texts_of_all
from tfdist.telemetry.events import Event, FanOut
from tfdist.training.evaluation import Evaluator
from tfdist.training.loop_hooks import LoopHooks
from tfdist.training.step_output import Requests

_REASON_BYTES = 400  # of a worker's reason, for the others


@dataclass(frozen=True)
class SessionHooks:
    """The session's functions for the loop, on one worker."""

    recovery: Recovery
    trainer: Trainer
    bad_samples: BadSamples
    observer: FanOut
    monitor: HealthMonitor
    signals: SignalRequests
    memory: WorkerMemory | None

    def for_loop(self, first_step: int) -> LoopHooks:
        """Makes the `LoopHooks` of the session. Called on all workers."""
        recovery, trainer, job = self.recovery, self.trainer, self.recovery.job
        config, evaluator = job.config, job.evaluator()
        return LoopHooks(
            step=trainer.step,
            iterators=self._iterators(first_step) if first_step < config.run.steps else [],
            schedule=trainer.schedule,
            global_batch=job.plan.global_batch,
            position=recovery.progress.consumed,
            clock=recovery.clock,
            observer=self._observe,
            extra_values=self._extra_values,
            evaluate=(lambda: self._evaluate(evaluator)) if evaluator else None,
            save=self.save,
            backup=recovery.back_up,
            requests=self._requests,
            section=self.section,
            on_nan=config.loop.on_nan,
            rollback=self._rollback if config.loop.on_nan == "rollback" else None,
            pull_state=trainer.pull_state,
            rates=trainer.rates,
            watch=trainer.watch,
            interval_sums=recovery.interval_sums,
            failed_together=lambda: evaluator is not None and evaluator.failed_together,
            save_final=self.save if config.checkpoint.save_final else None,
        )

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Context manager that reports what this worker is doing to the watchdog, and to observers that follow it."""
        with self.monitor.watchdog.section(name), self.observer.section(name):
            yield

    def save(self, step: int) -> None:
        """Writes a snapshot."""
        self.pull_state(step)
        self.recovery.save(step)

    def pull_state(self, step: int) -> None:
        """Brings the state to where it is saved and exported from."""
        if self.trainer.pull_state:
            self.trainer.pull_state(step)

    def report_saves(self, step: int) -> None:
        """Passes the writers' messages on to the observers."""
        for kind, values in self.recovery.files.messages():
            self.observer(Event(kind, step, values))

    def finish_saves(self, step: int) -> str:
        """Waits for the last write, and passes the writers' messages on. Returns why a worker could not write its
        snapshot, on all workers, or "": all end with one exit code, since engines may see only one, or the highest. A
        collective call."""
        own = self.recovery.files.finish()
        texts = enumerate(texts_of_all(self.recovery.runtime, own, _REASON_BYTES))
        self.report_saves(step)
        return own or next((f"{self.monitor.cluster.name(rank)}: {text}" for rank, text in texts if text), "")

    def _iterators(self, step: int) -> Sequence:
        return self.trainer.iterators(self.recovery.progress.consumed(step), self.recovery.stream_cut)

    def _evaluate(self, evaluator: Evaluator) -> dict[str, float]:
        self.recovery.settle_statistics()
        with self.bad_samples.naming(evaluated=True):
            found = evaluator()
        self.bad_samples.evaluated(found)
        return found

    def _observe(self, event: Event) -> None:
        self.observer(event)
        if event.kind == "eval":
            scores = {name.removeprefix("eval/"): value for name, value in event.values.items()}
            self.recovery.evaluated = event.step, scores
            if sentence := _never_best(self.recovery.job.config.checkpoint, scores):
                self.observer(Event("warning", event.step, {"message": sentence}))
        if event.kind == "train":
            self.bad_samples.observed(event)
        if event.kind == "train" and (sentence := self.recovery.losses.add(event.values["train/loss"])):
            self.observer(Event("warning", event.step, {"message": sentence}))

    def _extra_values(self) -> dict[str, float]:
        """Further values of a train event."""
        extra = self.trainer.extra_values()  # first, since the learning rate may depend on it
        return {"train/learning_rate": self.recovery.learning_rate(), **extra}

    def _rollback(self, step: int, period_end: int) -> tuple[int, Sequence]:
        found = self.bad_samples.flaws()
        # The length of a call depends on the clock, and on where the run was stopped.
        past = period_end if restore.scheduled(self.recovery.job.config).periods else step
        messages, restored = self.recovery.rollback(step, past)
        for message in filter(None, [*messages, found]):
            self.observer(Event("warning", restored, {"message": message}))
        return restored, self._iterators(restored)

    def _requests(self, step: int) -> Requests:
        """This worker's requests; also passes on the writers' messages, and copies the state if it may be needed."""
        self.monitor.faults.at("step", step)
        self.bad_samples.called_at = step
        self.report_saves(step)
        due = self.recovery.runtime.rank == 0 and self.recovery.time_policy.due()
        save, self.signals.save = self.signals.save or due, False
        if self.memory is None:
            return Requests(save, self.signals.stop)
        self.recovery.copy(step, self.memory)
        return Requests(save, self.signals.stop, self.memory.member.leave)


def _never_best(config: CheckpointConfig, scores: Mapping[str, float]) -> str:
    """A sentence if the score that --keep_best uses is not finite, else ""."""
    metric, keep_best = config.best_metric, config.keep_best
    score = scores.get(metric, 0.0)
    if math.isfinite(score):
        return ""
    return f"--keep_best={keep_best}: {metric} is {score}, so the snapshot of this step does not count as the best"
