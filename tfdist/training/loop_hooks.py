"""What the loop (loop.py) gets from a run: plain callables and parts, and when, in steps, it does what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from tfdist.telemetry.events import Tell
from tfdist.telemetry.rates import Rates
from tfdist.telemetry.timer import Clock
from tfdist.training.log_interval import IntervalSums, Watch
from tfdist.training.step_output import Requests, StepOutput

# Both bound how long a request to save or stop waits.
_MOST_STEPS_PER_CALL = 100
_MOST_SECONDS_PER_CALL = 5.0

Save = Callable[[int], None]  # on all workers; takes the step


class MakeSteps(Protocol):
    """Makes steps: a TrainStep, or the trainer of a parameter-server run."""

    def __call__(self, iterators: Sequence, n: int, requests: Requests, /) -> StepOutput:
        """Makes exactly n steps. What is asked for is answered in the output's `signals`, here or after a later call:
        when all workers know of it, and no step after the output's is under way."""
        ...


@dataclass(frozen=True)
class LoopSchedule:
    """Periods in steps; 0 or less: never. All workers must have the same."""

    target: int
    log_every: int
    eval_every: int
    save_every: int
    backup_every: int = 0
    steps_per_loop: int = 0
    save_at_evaluation: bool = False  # so that the best by a metric can be kept
    traced: tuple[int, int] | None = None  # steps (first, last) between which each is a call, so one step of the trace

    def next_boundary(self, step: int, step_s: float = 0.0) -> int:
        """The first step after `step` at which something is due.

        `step_s`: seconds per step, the same on all workers; 0: unknown.
        """
        affordable = max(1, int(_MOST_SECONDS_PER_CALL / step_s)) if step_s else _MOST_STEPS_PER_CALL
        most = step + (self.steps_per_loop or min(_MOST_STEPS_PER_CALL, affordable))
        boundary = min(self.next_period(step), most)
        if self.traced is None or step >= self.traced[1]:
            return boundary
        return min(boundary, max(step + 1, self.traced[0]))

    def next_period(self, step: int) -> int:
        """The first step after `step` at which a period of the run ends, however fast steps are and wherever it was
        stopped before.
        """
        return min([self.next_use_of_state(step), *_next_multiples(step, self.log_every)])

    def next_use_of_state(self, step: int) -> int:
        """The first step after `step` at which the state is used: for an evaluation, a snapshot, at the end.

        Steps up to there may be under way at the same time, those after it may not yet.
        """
        return min([self.target, *_next_multiples(step, self.eval_every, self.save_every, self.backup_every)])

    def due(self, period: int, before: int, step: int) -> bool:
        """Whether a multiple of `period` lies in (before, step]."""
        return period > 0 and step // period > before // period


def _next_multiples(step: int, *periods: int) -> list[int]:
    return [(step // period + 1) * period for period in periods if period > 0]


@dataclass
class LoopHooks:
    """Callables and parts that `train` uses; all are plain callables but the schedule, the clock and what measures."""

    step: MakeSteps
    iterators: Sequence
    schedule: LoopSchedule
    global_batch: int
    position: Callable[[int], int]  # step -> samples consumed
    clock: Clock
    observer: Tell
    extra_values: Callable[[], dict[str, float]]  # of a train event, such as the learning rate
    evaluate: Callable[[], dict[str, float]] | None  # on all workers
    save: Save
    backup: Save  # the same, for the short-lived backup
    requests: Callable[[int], Requests]  # what this worker asks for
    section: Callable[[str], AbstractContextManager]  # tells the watchdog what is being done
    on_nan: str = "stop"  # what the run does with bad numbers, for the sentence with which it stops
    # Maps a bad step, and the end of its period, to (a good one, its iterators); None: stop
    rollback: Callable[[int, int], tuple[int, Sequence]] | None = None
    # Before an evaluation: brings the state to where that finds it; None: it is there
    pull_state: Callable[[int], None] | None = None
    rates: Rates | None = None
    watch: Watch | None = None  # of where the time goes
    interval_sums: IntervalSums | None = None  # with which the first log interval begins; `rollback` sets them, too
    # After an evaluation that has failed: whether it has on all workers, or all know of it, so that they can save
    failed_together: Callable[[], bool] = lambda: False
    save_final: Save | None = None  # what comes after `train`, when the target is reached; None: nothing
