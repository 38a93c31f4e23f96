"""A case of tfdist.train in a worker process with the whole loop, as run/session.py puts it together: it evaluates,
saves, keeps the best snapshot, and rolls back from bad numbers. It runs once uninterrupted, and once stopped and
resumed. Both must end alike, bit for bit, where plain Keras ends on the samples that count (rollbacks.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from tests.fuzz import rollbacks, snapshots, stored_data, train_case
from tfdist.control.exit_codes import TfdistError

SLOW_STEP = 3.0  # seconds that a step seems to take


class Told(NamedTuple):
    """The values of the last event at each step: of evaluations, and of log lines."""

    evaluated: dict[int, dict[str, float]]
    logged: dict[int, dict[str, float]]


class End(NamedTuple):
    """The result of a run. part: see train_case.run. kept: the steps of its snapshots, on the chief."""

    part: dict[str, Any]
    kept: set[int]
    told: Told


def run(case: dict[str, Any], runtime: Any) -> dict[str, Any]:
    """See train_case.run. Raises what an uninterrupted run raises."""
    rolled, told = case["rolled"], Told({}, {})
    whole, error = _ended(case, runtime, snapshots.place_of(case, runtime), rolled.get("slow", False))
    place = snapshots.place_of(case, runtime)
    _, broken = _ended(case, runtime, place, False, told, stop=rolled["stop"])
    if broken is None:
        again, broken = _ended(case, runtime, place, False, told)
    if error or broken:
        if _said(error) != _said(broken):
            raise AssertionError(f"uninterrupted it ends with {error!r}, stopped and resumed with {broken!r}")
        raise error
    problems = []
    if unlike := snapshots.unlike(whole.part["state"], again.part["state"]):
        problems.append(
            f"stopped and resumed, {len(unlike)} variables are not bit for bit those of an uninterrupted run:"
            f" {', '.join(unlike[:4])}"
        )
    if runtime.rank == 0:
        problems += _of_snapshots(case, whole, again)
    return {"parts": [{**whole.part, "problems": problems}]}


def _said(error: TfdistError | None) -> str:
    """Returns the error as text, without the step at which NaN was noticed: it depends on how fast steps are."""
    return re.sub(r"before step \d+", "before a step", f"{type(error).__name__}: {error}")


def _of_snapshots(case: Mapping[str, Any], whole: End, again: End) -> list[str]:
    """Returns what is wrong with the snapshots, evaluations and log lines. The snapshots in a store are not checked:
    there is only a working copy of it.
    """
    problems = (
        []
        if case.get("stored")
        else [rollbacks.kept_wrongly(case, end.kept, end.told.evaluated) for end in (whole, again)]
    )
    for name, one, other in zip(Told._fields, whole.told, again.told, strict=True):
        if str(one) != str(other):
            problems.append(f"not bit for bit what an uninterrupted run has {name}: {one} {other}")
    return [problem for problem in problems if problem]


def _ended(
    case: Mapping[str, Any],
    runtime: Any,
    place: str,
    slow: bool,
    told: Told | None = None,
    stop: int = -1,
) -> tuple[Any, TfdistError | None]:
    """Runs from a place on, to the end or the stop. Returns (its End, None) or (None, the error that was raised)."""
    config, job, state = train_case.compose(case, runtime, _flags(case, place))
    try:
        with snapshots.recovery_of(job, place) as recovery:
            told = told or Told({}, {})
            try:
                _train(case, recovery, told, slow, stop)
            finally:
                recovery.files.close()
            kept = set(recovery.files.store.steps()) if runtime.rank == 0 else set()
        runtime.barrier()
        return End(train_case.collected(job, state, case, {}), kept, told), None
    except TfdistError as error:
        return None, error
    finally:
        stored_data.forget(config, runtime)


def _flags(case: Mapping[str, Any], place: str) -> dict[str, Any]:
    rolled = case["rolled"]
    backed_up = rolled.get("backup_every", 0)
    return {
        "deterministic": True,
        "on_nan": "rollback",
        "max_rollbacks": rolled["max_rollbacks"],
        "save_every": rolled["save_every"],
        "save_minutes": 0.0,
        "log_every": rolled["log_every"],
        "eval_every": rolled.get("eval_every", -1),
        "keep_best": rolled.get("keep_best", ""),
        "keep": 1,
        "backup_dir": f"{place}-backups" if backed_up else "",
        "backup_every": backed_up,
    }


def _train(case: Mapping[str, Any], recovery: Any, told: Told, slow: bool, stop: int) -> None:
    """Does what Session does from its second phase on."""
    from tfdist.control.signals import SignalRequests
    from tfdist.run.bad_samples import BadSamples
    from tfdist.run.trainer import LocalTrainer, TrainerInputs
    from tfdist.telemetry.events import FanOut
    from tfdist.training.loop import train
    from tfdist.training.loop_hooks import LoopSchedule

    job, signals = recovery.job, SignalRequests()
    loop, checkpoint = job.config.loop, job.config.checkpoint

    def observe(event: Any) -> None:
        if event.kind == "eval":
            told.evaluated[event.step] = {name.removeprefix("eval/"): value for name, value in event.values.items()}
        if event.kind == "train":
            told.logged[event.step] = {
                name: float(f"{value:.12g}")  # calls of other lengths add up in another order
                for name, value in event.values.items()
                if name.startswith("train/")
            }

    _, first = recovery.restore()
    recovery.run_id = "fuzz"
    schedule = LoopSchedule(
        job.config.run.steps,
        loop.log_every,
        loop.eval_every,
        checkpoint.save_every,
        recovery.backup_period(),
        save_at_evaluation=bool(checkpoint.keep_best),
    )
    observer = FanOut([observe])
    trainer = LocalTrainer(TrainerInputs(job, first, schedule, recovery.progress.consumed, recovery.clock, observer))
    nowhere = SimpleNamespace(
        watchdog=SimpleNamespace(section=lambda name: contextlib.nullcontext()), faults=recovery.faults
    )
    hooks = _hooks_class(case["rolled"].get("nan_evaluations", ()))(
        recovery, trainer, BadSamples(job, recovery, first, print), observer, nowhere, signals, None
    )
    if first == 0:
        recovery.save(0)
    looped = hooks.for_loop(first)
    looped.requests = _stopping(looped.requests, signals, stop)
    looped.step = _timed(looped.step, SLOW_STEP if slow else 1e-6)
    result = train(looped, first)
    if not result.stopped:
        hooks.save(result.step)
    failure = recovery.files.finish()
    assert not failure, failure


def _stopping(requests: Any, signals: Any, stop: int) -> Any:
    """Makes `requests` behave as if SIGTERM came when step `stop` is reached."""

    def asked(step: int) -> Any:
        signals.stop = 0 <= stop <= step
        return requests(step)

    return asked


def _timed(make_steps: Any, seconds: float) -> Any:
    """Makes each step seem to take so long, however fast the machine is."""

    def timed(*given: Any) -> Any:
        return dataclasses.replace(make_steps(*given), step_s=seconds)

    return timed


def _hooks_class(nan_at: Sequence[int]) -> Any:
    from tfdist.run.session_hooks import SessionHooks

    class Hooks(SessionHooks):
        """Hooks whose evaluations give NaN at some steps, like those of a model that overflows on one sample."""

        def _evaluate(self, evaluator: Any) -> dict[str, float]:
            found = super()._evaluate(evaluator)
            is_nan = int(self.recovery.job.step.counter.numpy()) in nan_at
            return {name: math.nan for name in found} if is_nan else found

    return Hooks
