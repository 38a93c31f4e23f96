"""The outer loop and its contract.

    state, clock, position = restored, or initialised (build.py; the chief decides, all follow)
    while step < target:
        n = steps until the next boundary (log, eval, save, steps_per_loop)
        out = make_steps(n)              # one tf.function, n a tensor: one trace for every n
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
from typing import Protocol

from tfdist.control.exit_codes import DivergedError
from tfdist.telemetry.events import Event, Observer
from tfdist.telemetry.rates import Rates
from tfdist.telemetry.timer import Clock
from tfdist.training.log_interval import Interval, Watch
from tfdist.training.loop_schedule import LoopSchedule
from tfdist.training.requests import Requests
from tfdist.training.step_output import StepOutput


class MakeSteps(Protocol):
    """What the loop drives: a TrainStep, or the trainer of a parameter-server run."""

    def __call__(self, iterators: Sequence, n: int, requests: Requests, /) -> StepOutput:
        """Makes exactly n steps. What is asked for is answered in the output's `signals`, here or after a later call:
        when all workers know of it, and no step after the output's is under way."""
        ...


@dataclass
class LoopHooks:
    """What the loop drives; all are plain callables but the schedule, the clock and what measures."""

    step: MakeSteps
    iterators: Sequence
    schedule: LoopSchedule
    global_batch: int
    position: Callable[[int], int]  # step -> samples consumed
    clock: Clock
    observer: Observer
    extra_values: Callable[[], dict[str, float]]  # of a train event, such as the learning rate
    evaluate: Callable[[], dict[str, float]] | None  # on all workers
    save: Callable[[int], None]  # on all workers; takes the step
    backup: Callable[[int], None]  # the same, for the short-lived backup
    requests: Callable[[int], Requests]  # what this worker asks for
    section: Callable[[str], AbstractContextManager]  # tells the watchdog what is being done
    # From a bad step to (a good one, its iterators); None: stop
    rollback: Callable[[int], tuple[int, Sequence]] | None = None
    # Before an evaluation: brings the state to where that finds it; None: it is there
    settle: Callable[[int], None] | None = None
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
    """Trains from `step` to the schedule's target. Raises DivergedError when loss or gradients are not finite."""
    schedule, clock, iterators, interval = hooks.schedule, hooks.clock, hooks.iterators, _interval(hooks)
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
        stopped, left = out.signals["stop"], out.signals["leave"]
        if not out.finite:
            if hooks.rollback is None:
                raise DivergedError(out.why_not_finite(before))
            with clock.pause("rollback"), hooks.section("restore"):
                step, iterators = hooks.rollback(step)
            interval = _interval(hooks)
            continue
        left = left and step < schedule.target
        interval.add(out, n, last=step == schedule.target)
        if schedule.due(schedule.log_every, before, step) or step == schedule.target:
            for event in interval.events(step, hooks.extra_values()):
                hooks.observer(event)
        if first:
            # Tracing left a large heap that lives as long as the run: never scan it again.
            gc.collect()
            gc.freeze()
            first = False
        if hooks.evaluate and schedule.due(schedule.eval_every, before, step):
            evaluation, evaluated_at = _evaluate(hooks, hooks.evaluate, step), step
        asked = out.signals["save"] or stopped or (schedule.save_at_evaluation and evaluated_at == step)
        if asked or schedule.due(schedule.save_every, before, step):
            _save(hooks, hooks.save, step)
        elif schedule.due(schedule.backup_every, before, step):
            _save(hooks, hooks.backup, step)
    if hooks.evaluate and schedule.eval_every >= 0 and evaluated_at != step and not stopped and not left:
        evaluation = _evaluate(hooks, hooks.evaluate, step)
    clock.stop()
    return TrainResult(step, stopped, evaluation, left and not stopped)


def _interval(hooks: LoopHooks) -> Interval:
    return Interval(hooks.clock, hooks.global_batch, hooks.position, hooks.rates, hooks.watch)


def _evaluate(hooks: LoopHooks, evaluate: Callable[[], dict[str, float]], step: int) -> dict[str, float]:
    if hooks.settle:
        _save(hooks, hooks.settle, step)
    with hooks.clock.pause("evaluation"), hooks.section("evaluation"):
        evaluation = evaluate()
    hooks.observer(Event("eval", step, {f"eval/{name}": value for name, value in evaluation.items()}))
    return evaluation


def _save(hooks: LoopHooks, save: Callable[[int], None], step: int) -> None:
    with hooks.clock.pause("saving"), hooks.section("save"):
        save(step)
