"""The trainers of a session: they run the steps of this worker's replicas, or those of workers that parameter servers
serve (parameter_server_run.py). All other parts of a run are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdist.build import Job
from tfdist.config.checks import what_divides_weights
from tfdist.control.exit_codes import ConfigError
from tfdist.telemetry.events import Tell
from tfdist.telemetry.rates import Rates
from tfdist.telemetry.timer import Clock
from tfdist.telemetry.trackers import by_path
from tfdist.training.log_interval import Watch
from tfdist.training.loop_hooks import LoopSchedule, MakeSteps
from tfdist.training.model_rates import make_rates


@dataclass(frozen=True)
class TrainerInputs:
    """The inputs of a trainer: a run that is ready to begin at `first_step`."""

    job: Job
    first_step: int
    schedule: LoopSchedule
    position: Callable[[int], int]  # step -> samples consumed
    clock: Clock
    observer: Tell


class Trainer:
    """The parts of a run that differ between kinds of runs.

    pull_state: see LoopHooks; also called before a save and before the exports. watch: measures where the time goes.
    """

    step: MakeSteps
    schedule: LoopSchedule
    rates: Rates | None = None
    watch: Watch | None = None
    pull_state: Callable[[int], None] | None = None

    def iterators(self, consumed: int, cut: int | None) -> Sequence:
        """The iterators of the training data, see Job.iterators."""
        return []

    def extra_values(self) -> dict[str, float]:
        """Additional values of a train event."""
        return {}

    def show_weights(self) -> None:
        """Brings the model's weights up to date for a tracker, at any event. Raises ConfigError if that cannot be."""

    def summary(self) -> dict[str, Any]:
        """Additional values of the run's summary."""
        return {}

    def cause(self, error: BaseException) -> BaseException | None:
        """Explains an error that only this kind of run understands; None: unknown."""
        return None

    def close(self) -> None:
        """Ends training."""


def shown_weights(job: Job, trainer: Trainer) -> dict[str, np.ndarray]:
    """Path -> value of the trainable variables as of now, for a tracker. Raises ConfigError if that cannot be."""
    if cut := what_divides_weights(job.config):
        raise ConfigError(f"{cut}: a tracker cannot have the weights, since no worker holds them whole.")
    trainer.show_weights()
    return by_path(job.model.trainable_variables)


class LocalTrainer(Trainer):
    """Trains on the replicas of this worker, together with those of the other workers."""

    def __init__(self, inputs: TrainerInputs):
        job, self.schedule = inputs.job, inputs.schedule
        self._job, self.step = job, job.step
        self.rates = make_rates(job.config, job.runtime, job.model, job.train_split, job.plan.micro_batch)
        runtime, factor = job.runtime, job.config.cluster.straggler_factor
        self.watch = Watch(inputs.clock, runtime.rank, runtime.all_gather, job.step.splits, factor)

    def iterators(self, consumed: int, cut: int | None) -> Sequence:
        return self._job.iterators(consumed, cut)

    def extra_values(self) -> dict[str, float]:
        return self._job.step.update.figures()
