"""The input of the loop (loop.py): plain callables and parts of the run, and the schedule, in steps, of its actions."""

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

# Both limit how long a request to save or stop waits.
_MOST_STEPS_PER_CALL = 100
_MOST_SECONDS_PER_CALL = 5.0

Save = Callable[[int], None]  # on all workers; takes the step


class MakeSteps(Protocol):
    """Makes steps: a TrainStep, or the trainer of a parameter-server run."""

    def __call__(self, iterators: Sequence, n: int, requests: Requests, /) -> StepOutput:
        """Makes exactly n steps. Requests are answered in the `signals` of the output of this call or of a later one:
        once all workers know of them, and no step beyond the output's is under way."""
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
    save_at_evaluation: bool = False  # so that the best snapshot by a metric can be kept
    # Steps (first, last) between which each step is a call of its own, so that the profile shows it as one step.
    traced: tuple[int, int] | None = None

    def next_boundary(self, step: int, step_s: float = 0.0) -> int:
        """Returns the first step after `step` at which something is due.

        step_s: seconds per step, the same on all workers; 0: unknown.
        """
        affordable = max(1, int(_MOST_SECONDS_PER_CALL / step_s)) if step_s else _MOST_STEPS_PER_CALL
        most = step + (self.steps_per_loop or min(_MOST_STEPS_PER_CALL, affordable))
        boundary = min(self.next_period(step), most)
        if self.traced is None or step >= self.traced[1]:
            return boundary
        return min(boundary, max(step + 1, self.traced[0]))

    def next_period(self, step: int) -> int:
        """Returns the first step after `step` at which a period of the run ends, whatever the speed of the steps and
        wherever the run was stopped before.
        """
        return min([self.next_use_of_state(step), *_next_multiples(step, self.log_every)])

    def next_use_of_state(self, step: int) -> int:
        """Returns the first step after `step` at which the state is used: for an evaluation, a snapshot, or at the end.

        Steps up to this one may be under way at the same time; later steps must not have started.
        """
        return min([self.target, *_next_multiples(step, self.eval_every, self.save_every, self.backup_every)])

    def due(self, period: int, before: int, step: int) -> bool:
        """Returns whether a multiple of `period` lies in (before, step]."""
        return period > 0 and step // period > before // period


def _next_multiples(step: int, *periods: int) -> list[int]:
    return [(step // period + 1) * period for period in periods if period > 0]


@dataclass
class LoopHooks:
    """Callables and parts that `train` uses. All are plain callables, except the schedule, the clock and the meters."""

    step: MakeSteps
    iterators: Sequence
    schedule: LoopSchedule
    global_batch: int
    position: Callable[[int], int]  # step -> samples consumed
    clock: Clock
    observer: Tell
    extra_values: Callable[[], dict[str, float]]  # for a train event, such as the learning rate
    evaluate: Callable[[], dict[str, float]] | None  # called on all workers
    save: Save
    backup: Save  # the same, for the short-lived backup
    requests: Callable[[int], Requests]  # the requests of this worker
    section: Callable[[str], AbstractContextManager]  # tells the watchdog which section the run is in
    on_nan: str = "stop"  # how the run handles bad numbers, for the message with which it stops
    # Maps a bad step, and the end of its period, to (a good step, its iterators); None: stop
    rollback: Callable[[int, int], tuple[int, Sequence]] | None = None
    # Called before an evaluation: brings the state to where the evaluation reads it; None: it is there already
    pull_state: Callable[[int], None] | None = None
    rates: Rates | None = None
    watch: Watch | None = None  # follows how time is spent
    interval_sums: IntervalSums | None = None  # with which the first log interval begins; `rollback` sets them, too
    # Called after a failed evaluation: whether it failed on all workers, or all know of it, so that they can save
    failed_together: Callable[[], bool] = lambda: False
    save_final: Save | None = None  # saves after `train`, when the target is reached; None: nothing is saved then
