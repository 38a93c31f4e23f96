"""What the loop (loop.py) gets from a run, as plain callables and parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from tfdist.telemetry.events import Observer
from tfdist.telemetry.rates import Rates
from tfdist.telemetry.timer import Clock
from tfdist.training.log_interval import Watch
from tfdist.training.loop_schedule import LoopSchedule
from tfdist.training.requests import Requests
from tfdist.training.step_output import StepOutput

Save = Callable[[int], None]  # on all workers; takes the step


class MakeSteps(Protocol):
    """Makes steps: a TrainStep, or the trainer of a parameter-server run."""

    def __call__(self, iterators: Sequence, n: int, requests: Requests, /) -> StepOutput:
        """Makes exactly n steps. What is asked for is answered in the output's `signals`, here or after a later call:
        when all workers know of it, and no step after the output's is under way."""
        ...


@dataclass
class LoopHooks:
    """Callables and parts that `train` uses; all are plain callables but the schedule, the clock and what measures."""

    step: MakeSteps
    iterators: Sequence
    schedule: LoopSchedule
    global_batch: int
    position: Callable[[int], int]  # step -> samples consumed
    clock: Clock
    observer: Observer
    extra_values: Callable[[], dict[str, float]]  # of a train event, such as the learning rate
    evaluate: Callable[[], dict[str, float]] | None  # on all workers
    save: Save
    backup: Save  # the same, for the short-lived backup
    requests: Callable[[int], Requests]  # what this worker asks for
    section: Callable[[str], AbstractContextManager]  # tells the watchdog what is being done
    # Maps a bad step to (a good one, its iterators); None: stop
    rollback: Callable[[int], tuple[int, Sequence]] | None = None
    # Before an evaluation: brings the state to where that finds it; None: it is there
    pull_state: Callable[[int], None] | None = None
    rates: Rates | None = None
    watch: Watch | None = None  # of where the time goes
    # After an evaluation that has failed: whether it has on all workers, or all know of it, so that they can save
    failed_together: Callable[[], bool] = lambda: False
    save_final: Save | None = None  # what comes after `train`, when the target is reached; None: nothing
