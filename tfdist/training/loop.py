"""The outer loop and its contract.

    before: state, clock and position are restored, or start fresh (run/recovery.py; the chief decides, all follow)
    while step < target:
        n = steps until the next boundary (log, evaluation, save, backup, profile, steps_per_loop)
        out = make_steps(n)              # one tf.function, n a tensor: one trace for every n
        the step counter must have moved by exactly n, or the run stops
        if loss or gradients were not finite: roll back (--on_nan=rollback) and return to `while`, or the run stops;
            steps that the step function itself skipped (--on_nan=skip, float16) stop the run only if there are
            50 of them in a row (log_interval.py)
        at a log boundary, and at the target: observers(events)
        at an evaluation boundary: evaluate; if that fails on all workers, save the snapshot that is due and end the run
        at a save boundary, with --keep_best at an evaluation boundary, or if any worker asked to save or to stop:
            save(step)
        else, at a backup boundary: backup(step)
        if any worker asked to stop, or to leave its group: break
    unless a worker asked to stop or to leave: evaluate if the last step has not been evaluated yet (with --keep_best:
        before the snapshot of that step)
    after: the last snapshot and the exports (run/session.py)

Requests cost nothing: they travel in the step's own reduction, so all workers read the same answer at the same step.
Steps are made by this worker's replicas together with those of other workers (step.py), or by workers that a chief
calls (parameter_server/). The latter may have several steps under way while the loop logs, but none beyond the step at
which the state is used. The loop knows no strategy, model, source or tracker; they come in through `LoopHooks`.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass

from tfdist.control import sections
from tfdist.control.exit_codes import DivergedError
from tfdist.telemetry.events import Event
from tfdist.training.log_interval import Interval
from tfdist.training.loop_hooks import LoopHooks, Save


@dataclass(frozen=True)
class TrainResult:
    """The result of `train`."""

    step: int
    stopped: bool  # by request, before the target
    evaluation: dict[str, float]  # results of the last evaluation
    left: bool  # by request, to continue in another group of workers


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
        with hooks.section(sections.FIRST_STEP if first else sections.STEP):
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
                raise DivergedError(out.why_not_finite(before, hooks.on_nan))
            with clock.pause("rollback"), hooks.section(sections.RESTORE):
                step, iterators = hooks.rollback(step, schedule.next_period(before))
                interval = _interval(hooks)  # its first event has the pause
            continue
        left = left and step < schedule.target
        interval.add(out, n, last=step == schedule.target)
        if schedule.due(schedule.log_every, before, step) or step == schedule.target:
            for event in interval.events(step, hooks.extra_values()):
                hooks.observer(event)
        if first:
            # Tracing leaves a large heap that lives as long as the run: the garbage collector need never scan it again.
            gc.collect()
            gc.freeze()
            first = False
        evaluated = hooks.evaluate is not None and schedule.due(schedule.eval_every, before, step)
        asked = out.signals["save"] or stopped or (schedule.save_at_evaluation and evaluated)
        if schedule.save_at_evaluation and step == schedule.target and not stopped:  # its snapshot holds its scores
            evaluated = hooks.evaluate is not None and schedule.eval_every >= 0
        due = hooks.save if asked or schedule.due(schedule.save_every, before, step) else None
        if due is None and schedule.due(schedule.backup_every, before, step):
            due = hooks.backup
        if hooks.evaluate and evaluated:
            evaluation, evaluated_at = _evaluate(hooks, hooks.evaluate, step, due), step
        if due:
            _save(hooks, due, step)
    if hooks.evaluate and schedule.eval_every >= 0 and evaluated_at != step and not stopped and not left:
        evaluation = _evaluate(hooks, hooks.evaluate, step, None)
    clock.stop()
    return TrainResult(step, stopped, evaluation, left and not stopped)


def _interval(hooks: LoopHooks) -> Interval:
    return Interval(hooks.clock, hooks.global_batch, hooks.position, hooks.rates, hooks.watch, hooks.interval_sums)


def _evaluate(hooks: LoopHooks, evaluate: Callable[[], dict[str, float]], step: int, due: Save | None) -> dict:
    """Evaluates and reports the result. due: saves the snapshot of this step, which comes after the evaluation because
    it holds the result; if the evaluation fails, the snapshot is still saved."""
    if hooks.pull_state:
        _save(hooks, hooks.pull_state, step)
    try:
        with hooks.clock.pause("evaluation"), hooks.section(sections.EVALUATION):
            evaluation = evaluate()
    except Exception:
        save = hooks.save_final if step == hooks.schedule.target and hooks.save_final else due
        if save and hooks.failed_together():
            with contextlib.suppress(Exception):  # the run ends with the error of the evaluation
                _save(hooks, save, step)
        raise
    hooks.observer(Event("eval", step, {f"eval/{name}": value for name, value in evaluation.items()}))
    return evaluation


def _save(hooks: LoopHooks, save: Save, step: int) -> None:
    with hooks.clock.pause("saving"), hooks.section(sections.SAVE):
        save(step)
