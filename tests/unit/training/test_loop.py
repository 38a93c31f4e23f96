"""The loop's contract, with a step that only counts."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest

from tfdist.control.exit_codes import DivergedError
from tfdist.telemetry.timer import Clock
from tfdist.training.loop import train
from tfdist.training.loop_hooks import LoopHooks, LoopSchedule
from tfdist.training.step_output import NOTHING, Requests, StepOutput


class Run:
    """Hooks that write down what happened, and a step that is made of `bad` and `skips` steps."""

    def __init__(self, schedule, bad=(), answers=None, off_by=0, **hooks):
        self.said, self.events, self.step, self.bad, self.answers = [], [], 0, set(bad), answers or {}
        self.off_by, self.clock = off_by, Clock()
        defaults = {
            "evaluate": lambda: self.say("evaluate") or {"loss": float(self.step)},
            "requests": lambda step: NOTHING,
            "iterators": ["first"],
        }
        self.hooks = LoopHooks(
            step=self,
            schedule=schedule,
            global_batch=4,
            position=lambda step: 4 * step,
            clock=self.clock,
            observer=self.events.append,
            extra_values=lambda: {"train/learning_rate": 0.5},
            save=lambda step: self.say(f"save {step}"),
            backup=lambda step: self.say(f"backup {step}"),
            section=self.section,
            **{**defaults, **hooks},
        )

    def say(self, what):
        self.said.append(what)

    @contextlib.contextmanager
    def section(self, name):
        self.now = name
        yield

    def __call__(self, iterators, n, requests, /):
        self.say(f"{self.now} {n} {iterators[0]}")
        self.step += n + self.off_by
        asked = self.answers.get(self.step, NOTHING)
        signals = {
            name: asked_for or value
            for (name, value), asked_for in zip(
                dataclasses.asdict(asked).items(), dataclasses.asdict(requests).values(), strict=True
            )
        }
        finite = self.step not in self.bad
        self.bad.discard(self.step)
        return StepOutput(
            step=self.step,
            means={"loss": 1.0},
            weight=4.0 * n,
            gradient_norm=2.0,
            loss_scale=1.0,
            skipped=0,
            finite=finite,
            sums={"loss": 8.0 * n},
            signals=signals,
            step_s=0.0,
            compute_s=np.zeros(0),
        )

    def train(self, step=0):
        self.step = step
        return train(self.hooks, step)

    def and_train(self):
        self.train()
        return self


def test_all_that_is_due_happens_at_its_step_and_in_order():
    run = Run(LoopSchedule(10, log_every=4, eval_every=5, save_every=6, backup_every=3))
    result = run.train()
    assert run.said == [
        "first step 3 first",
        "backup 3",
        "step 1 first",
        "step 1 first",
        "evaluate",
        "step 1 first",
        "save 6",  # and no backup beside it
        "step 2 first",
        "step 1 first",
        "backup 9",
        "step 1 first",
        "evaluate",
    ]
    assert [(event.kind, event.step) for event in run.events] == [
        ("train", 4),
        ("eval", 5),
        ("train", 8),
        ("train", 10),
        ("eval", 10),
    ]
    train_event = run.events[0].values
    assert train_event["train/loss"] == 2.0 and train_event["train/learning_rate"] == 0.5
    assert train_event["data/consumed_samples"] == 16 and run.events[1].values == {"eval/loss": 5.0}
    assert (result.step, result.stopped, result.left, result.evaluation) == (10, False, False, {"loss": 10.0})


def test_the_last_evaluation_is_not_made_twice_nor_against_the_users_will():
    run = Run(LoopSchedule(4, 0, 2, 0))
    assert run.train().evaluation == {"loss": 4.0} and run.said.count("evaluate") == 2
    run = Run(LoopSchedule(4, 0, 0, 0))
    assert run.train().evaluation == {"loss": 4.0} and run.said.count("evaluate") == 1
    run = Run(LoopSchedule(4, 0, -1, 0))
    assert run.train().evaluation == {} and "evaluate" not in run.said
    run = Run(LoopSchedule(4, 0, 2, 0), evaluate=None)
    assert run.train().evaluation == {}


def test_the_best_is_found_before_the_last_snapshot_is_written():
    """--keep_best: a snapshot of the last step without its scores could not be the best."""
    assert Run(LoopSchedule(4, 0, 0, 2)).and_train().said[-3:] == ["step 2 first", "save 4", "evaluate"]
    best = LoopSchedule(4, 0, 0, 2, save_at_evaluation=True)
    assert Run(best).and_train().said == ["first step 2 first", "save 2", "step 2 first", "evaluate", "save 4"]
    without_save = Run(LoopSchedule(4, 0, 3, 0, save_at_evaluation=True)).and_train()
    assert without_save.said == ["first step 3 first", "evaluate", "save 3", "step 1 first", "evaluate"]
    stopped = Run(best, answers={4: Requests(stop=True)}).and_train()
    assert stopped.said == ["first step 2 first", "save 2", "step 2 first", "save 4"]
    never = Run(LoopSchedule(4, 0, -1, 2, save_at_evaluation=True)).and_train()
    assert "evaluate" not in never.said


@pytest.mark.parametrize("off_by", [-1, 1])
def test_a_counter_that_did_not_move_as_asked_ends_the_run(off_by):
    run = Run(LoopSchedule(4, 2, 2, 2), off_by=off_by)
    with pytest.raises(RuntimeError, match=f"counter is {2 + off_by} after 2 steps from 0: the run stops"):
        run.train()
    assert run.said == ["first step 2 first"] and not run.events


def test_a_run_that_went_on_ends_at_once_if_nothing_is_left():
    run = Run(LoopSchedule(4, 1, -1, 1))
    assert run.train(4).step == 4 and not run.said


def test_what_is_not_finite_ends_the_run_before_anything_is_saved():
    run = Run(LoopSchedule(6, 2, 2, 2), bad=[4])
    with pytest.raises(DivergedError, match="between step 2 and 4 .loss 1.0.: lower --learning_rate"):
        run.train()
    assert "save 2" in run.said and "save 4" not in run.said and [event.step for event in run.events] == [2, 2]


def test_a_rollback_goes_on_from_the_good_step_with_its_iterators():
    def rollback(step, period_end):
        run.say(f"roll back {step} {period_end}")
        run.step = 2
        return 2, ["second"]

    run = Run(LoopSchedule(6, 3, -1, 2), bad=[4], rollback=rollback)
    assert run.train().step == 6
    assert run.said == [
        "first step 2 first",
        "save 2",
        "step 1 first",
        "step 1 first",
        "roll back 4 4",
        "step 1 second",
        "step 1 second",
        "save 4",
        "step 2 second",
        "save 6",
    ]
    assert [event.step for event in run.events] == [3, 3, 6]
    assert run.events[1].values["pause/rollback_s"] == run.clock.pauses["rollback"] > 0
    assert run.events[1].values["perf/steps_per_s"] > 0


@pytest.mark.parametrize(("begin", "step_s", "noticed"), [(0, 0.01, 20), (0, 2.5, 16), (14, 2.5, 20)])
def test_bad_numbers_end_a_period_that_neither_the_clock_nor_a_stop_decides(begin, step_s, noticed):
    """In step 16: short calls, of slow steps, notice it at once; the first call of a run that goes on is not short."""

    def rollback(step, period_end):
        ends.append((step, period_end))
        run.bad.clear()
        run.step = 10
        return 10, ["second"]

    ends = []
    run = Run(LoopSchedule(40, 10, -1, 0), bad=[16, 20], rollback=rollback)
    run.hooks.step = lambda *given: dataclasses.replace(run(*given), step_s=step_s)
    assert run.train(begin).step == 40 and ends == [(noticed, 20)]


def test_who_is_asked_to_stop_saves_and_evaluates_no_more():
    run = Run(LoopSchedule(9, 0, 5, 0, steps_per_loop=2), requests=lambda step: Requests(stop=step == 4))
    result = run.train()
    assert (result.step, result.stopped) == (5, True)
    assert run.said[-3:] == ["step 1 first", "evaluate", "save 5"]
    run = Run(LoopSchedule(9, 0, 0, 0, steps_per_loop=2), requests=lambda step: Requests(stop=step == 4))
    result = run.train()
    assert (result.step, result.stopped, result.evaluation) == (6, True, {}) and run.said[-1] == "save 6"


def test_a_request_may_be_answered_later():
    """As where steps are under way when it comes."""
    asked = {2: Requests(save=True)}
    run = Run(LoopSchedule(8, 0, -1, 0, steps_per_loop=1), answers={5: asked[2]})
    run.train()
    assert [what for what in run.said if what.startswith("save")] == ["save 5"]


def test_who_leaves_the_group_saves_nothing_but_at_the_target_all_is_done():
    run = Run(LoopSchedule(6, 0, 0, 0, steps_per_loop=3), requests=lambda step: Requests(leave=True))
    result = run.train()
    assert (result.step, result.left, result.stopped) == (3, True, False) and run.said == ["first step 3 first"]
    run = Run(LoopSchedule(6, 0, 0, 0), requests=lambda step: Requests(leave=True))
    result = run.train()
    assert (result.step, result.left) == (6, False) and run.said[-1] == "evaluate"


def test_the_best_can_be_kept_as_every_evaluation_is_saved():
    run = Run(LoopSchedule(4, 0, 2, 0, save_at_evaluation=True))
    run.train()
    assert run.said == ["first step 2 first", "evaluate", "save 2", "step 2 first", "evaluate", "save 4"]


class FailedEvaluation(Exception):
    """Stands for whatever one may raise."""


def failing(schedule, **hooks):
    """What is said by a run whose evaluations fail, from its first evaluation on."""
    run = Run(schedule)

    def evaluate():
        run.say("evaluate")
        raise FailedEvaluation

    final = {"save_final": lambda step: run.say(f"final {step}"), "failed_together": lambda: True}
    run.hooks = dataclasses.replace(run.hooks, **{"evaluate": evaluate, **final, **hooks})
    with pytest.raises(FailedEvaluation):
        run.train()
    assert "eval" not in [event.kind for event in run.events]
    return run.said[run.said.index("evaluate") + 1 :]


def test_a_failing_evaluation_does_not_cost_the_snapshot_of_its_step():
    assert failing(LoopSchedule(9, 0, 4, 4)) == ["save 4"]
    assert failing(LoopSchedule(9, 0, 4, 0, backup_every=2)) == ["backup 4"]
    assert failing(LoopSchedule(9, 0, 4, 0, save_at_evaluation=True)) == ["save 4"]
    assert failing(LoopSchedule(9, 0, 4, 0), requests=lambda step: Requests(stop=True)) == ["save 4"]
    assert failing(LoopSchedule(9, 0, 4, 3)) == []  # none is due


@pytest.mark.parametrize("eval_every", [0, 4, 8])
def test_a_failing_last_evaluation_does_not_cost_the_last_snapshot(eval_every):
    target = 4 if eval_every == 4 else 8
    assert failing(LoopSchedule(target, 0, eval_every, 0)) == [f"final {target}"]
    assert failing(LoopSchedule(target, 0, eval_every, 0), save_final=None) == []


def test_after_a_failing_evaluation_nobody_saves_alone():
    assert failing(LoopSchedule(9, 0, 4, 4), failed_together=lambda: False) == []


def test_a_failing_evaluation_is_told_of_even_if_the_save_fails():
    def save(step):
        raise OSError("no space")

    assert failing(LoopSchedule(9, 0, 4, 4), save=save) == []


def test_a_state_that_lies_elsewhere_comes_before_it_is_evaluated():
    run = Run(LoopSchedule(4, 1, 2, 0), pull_state=lambda step: run.say(f"settle {step}"))
    run.train()
    assert [what for what in run.said if "step" not in what] == ["settle 2", "evaluate", "settle 4", "evaluate"]
    assert set(run.clock.pauses) == {"saving", "evaluation"}


def test_calls_stay_short_enough_to_be_asked_something():
    schedule = LoopSchedule(1000, 0, 0, 0)
    assert schedule.next_boundary(0) == 100 and schedule.next_boundary(0, step_s=0.5) == 10
    assert schedule.next_boundary(0, step_s=60.0) == 1 and schedule.next_boundary(950) == 1000
    assert LoopSchedule(1000, 30, 0, 0, steps_per_loop=7).next_boundary(28) == 30
    assert LoopSchedule(1000, 30, 50, 80, 70).next_use_of_state(49) == 50
    assert LoopSchedule(1000, 30, 50, 80, 70).next_use_of_state(50) == 70
    assert LoopSchedule(60, 30, 0, -1).next_use_of_state(1) == 60
