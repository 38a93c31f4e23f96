"""The outer loop and its contract.

    state, clock, position = restored, or initialised (build.py; the chief decides, all follow)
    while step < target:
        n = steps until the next boundary (log, eval, save, steps_per_loop)
        out = multi_step(n)              # one tf.function, n a tensor: one trace for every n
        the step counter must have moved by exactly n, or the run stops
        if loss or gradients are not finite: go back (--on_nan=rollback), or the run stops
        observers(event)
        if all agree to save: save(step)
        if all agree to stop, or to leave: break

Agreement costs nothing: what a worker asks for travels in the step's own reduction, so every worker reads the same
answer at the same step. The loop knows no strategy, model, source or tracker; they come in through `LoopHooks`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tfdist.control.exit_codes import DivergedError
from tfdist.telemetry.events import Event, Observer
from tfdist.telemetry.rates import Rates
from tfdist.telemetry.timer import Clock
from tfdist.training.log_interval import Interval, Watch
from tfdist.training.requests import Requests
from tfdist.training.step import TrainStep

# Both bound how long a request to save or stop waits.
_MOST_STEPS_PER_LOOP = 100
_MOST_SECONDS_PER_LOOP = 5.0


@dataclass(frozen=True)
class LoopSchedule:
    """When, in steps, what happens. 0 or less: never."""

    target: int
    log_every: int
    eval_every: int
    save_every: int
    backup_every: int = 0
    steps_per_loop: int = 0
    save_at_evaluation: bool = False  # so that the best by a metric can be kept

    def next_boundary(self, step: int, step_s: float = 0.0) -> int:
        """The first step after `step` at which something is due.

        `step_s`: seconds per step, the same on all workers; 0: unknown.
        """
        affordable = max(1, int(_MOST_SECONDS_PER_LOOP / step_s)) if step_s else _MOST_STEPS_PER_LOOP
        most = step + (self.steps_per_loop or min(_MOST_STEPS_PER_LOOP, affordable))
        periods = [
            period for period in (self.log_every, self.eval_every, self.save_every, self.backup_every) if period > 0
        ]
        return min([self.target, most, *((step // period + 1) * period for period in periods)])

    def due(self, period: int, before: int, step: int) -> bool:
        """Whether a multiple of `period` lies in (before, step]."""
        return period > 0 and step // period > before // period


@dataclass
class LoopHooks:
    """What the loop drives; all are plain callables but the step and the clock."""

    step: TrainStep
    iterators: Sequence
    schedule: LoopSchedule
    global_batch: int
    position: Callable[[int], int]  # step -> samples consumed
    clock: Clock
    observer: Observer
    told: Callable[[], dict[str, float]]  # further values of a train event, such as the learning rate
    evaluate: Callable[[], dict[str, float]] | None  # on all workers
    save: Callable[[int], None]  # on all workers; takes the step
    backup: Callable[[int], None]  # the same, for the short-lived backup
    requests: Callable[[int], Requests]  # what this worker asks for
    section: Callable[[str], AbstractContextManager]  # tells the watchdog what is being done
    rollback: Callable[[int], tuple[int, Sequence]] | None = (
        None  # from a bad step to (a good one, its iterators); None: stop
    )
    rates: Rates | None = None
    watch: Watch | None = None  # of where the time goes


@dataclass(frozen=True)
class TrainResult:
    """How the loop ended."""

    step: int
    stopped: bool  # by request, before the target
    evaluation: dict[str, float]  # the last one
    left: bool = False  # by request, to go on in another group of workers


def train(hooks: LoopHooks, step: int) -> TrainResult:
    """Trains from `step` to the schedule's target.

    Raises: DivergedError when loss or gradients are not finite; RuntimeError when the step counter and the loop
    disagree.
    """
    schedule, clock, iterators = hooks.schedule, hooks.clock, hooks.iterators
    interval = Interval(clock, hooks.global_batch, hooks.position, hooks.rates, hooks.watch)
    evaluation: dict[str, float] = {}
    evaluated_at = -1
    stopped = left = False
    step_s, first = 0.0, True
    clock.start()
    while step < schedule.target and not stopped and not left:
        n = schedule.next_boundary(step, step_s) - step
        with hooks.section("first step" if first else "step"):
            out = hooks.step(iterators, n, hooks.requests(step))
        if out.step != step + n:
            raise RuntimeError(
                f"The step counter is {out.step} after {n} steps from {step}: the run stops, its state cannot be"
                " trusted."
            )
        before, step, step_s = step, out.step, out.step_s
        if not out.finite:
            if hooks.rollback is None:
                raise DivergedError(
                    f"Loss or gradients became NaN or infinite between step {before} and {step} (loss"
                    f" {out.means['loss']}): lower --learning_rate, set --clip_norm, or use --on_nan=skip or"
                    " --on_nan=rollback."
                )
            with clock.pause("rollback"), hooks.section("restore"):
                step, iterators = hooks.rollback(step)
            interval, stopped, left = (
                Interval(clock, hooks.global_batch, hooks.position, hooks.rates, hooks.watch),
                out.signals["stop"],
                out.signals["leave"],
            )
            continue
        interval.add(out, n, last=step == schedule.target)
        if schedule.due(schedule.log_every, before, step) or step == schedule.target:
            for event in interval.events(step, hooks.told()):
                hooks.observer(event)
        if first:
            # Tracing left a large heap that lives as long as the run: never scan it again.
            gc.collect()
            gc.freeze()
            first = False
        stopped, left = out.signals["stop"], out.signals["leave"] and step < schedule.target
        if hooks.evaluate and schedule.due(schedule.eval_every, before, step):
            evaluation, evaluated_at = _evaluate(hooks, step), step
        asked = out.signals["save"] or stopped or (schedule.save_at_evaluation and evaluated_at == step)
        if asked or schedule.due(schedule.save_every, before, step):
            with clock.pause("saving"), hooks.section("save"):
                hooks.save(step)
        elif schedule.due(schedule.backup_every, before, step):
            with clock.pause("saving"), hooks.section("save"):
                hooks.backup(step)
    if hooks.evaluate and schedule.eval_every >= 0 and evaluated_at != step and not stopped and not left:
        evaluation = _evaluate(hooks, step)
    clock.stop()
    return TrainResult(step, stopped, evaluation, left and not stopped)


def _evaluate(hooks: LoopHooks, step: int) -> dict[str, float]:
    with hooks.clock.pause("evaluation"), hooks.section("evaluation"):
        evaluation = hooks.evaluate()
    hooks.observer(Event("eval", step, {f"eval/{name}": value for name, value in evaluation.items()}))
    return evaluation
