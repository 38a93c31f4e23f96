"""The values of a train event."""

import dataclasses
import json
import math

import numpy as np
import pytest

from tfdist.control.exit_codes import DivergedError
from tfdist.telemetry.timer import Clock
from tfdist.training.log_interval import Interval, IntervalSums
from tfdist.training.step_output import StepOutput


def test_pauses_are_told_once_and_take_no_time_from_the_speed():
    now = [0.0]
    clock = Clock(lambda: now[0])
    clock.restore({"seconds": 100.0, "pauses": {"saving": 7.0}})  # of earlier attempts
    interval = Interval(clock, 8, lambda step: 8 * step, rates=None, watch=None)
    clock.start()

    def event(step, train, **pauses):
        now[0] += train
        for name, seconds in pauses.items():
            with clock.pause(name):
                now[0] += seconds
        fields = dict.fromkeys((field.name for field in dataclasses.fields(StepOutput)), 0) | {
            "news": (),
            "step": step,
            "sums": {"loss": 4.0},
            "weight": 2.0,
            "compute_s": np.zeros(1),
            "call": None,
        }
        interval.add(StepOutput(**fields), 4)
        return interval.event(step, {"train/learning_rate": 0.1}).values

    first, second, third = event(4, 2.0, evaluation=5.0, saving=1.0), event(8, 4.0), event(12, 2.0, saving=0.5)
    assert [values["perf/steps_per_s"] for values in (first, second, third)] == pytest.approx([2.0, 1.0, 2.0])
    assert [
        {name: value for name, value in values.items() if name.startswith("pause/")}
        for values in (first, second, third)
    ] == [{"pause/saving_s": 1.0, "pause/evaluation_s": 5.0}, {}, {"pause/saving_s": 0.5}]


def output(step, n, skipped, loss=0.5):
    counted = n - skipped
    return StepOutput(
        step, {}, 8.0 * counted, 1.0, 1.0, skipped, True, {"loss": 8.0 * counted * loss}, {}, 0.0, np.zeros(0)
    )


def test_skipped_steps_are_not_part_of_the_loss_that_is_shown():
    interval = Interval(Clock(), 8, lambda step: 8 * step, rates=None, watch=None)
    interval.add(output(4, 4, 1), 4)
    (event,) = interval.events(4, {})
    assert event.values["train/loss"] == 0.5 and event.values["train/skipped_steps"] == 1
    interval.add(output(8, 4, 4), 4)
    warning, event = interval.events(8, {})
    assert "All of the last 4 steps were skipped" in warning.values["message"] and np.isnan(event.values["train/loss"])


def test_an_interval_that_is_gone_on_with_shows_means_over_all_of_it():
    calls = [output(1, 1, 0, 0.25), output(3, 2, 1, 2.0), output(4, 1, 0, 1.0)]
    whole = Interval(Clock(), 8, lambda step: 8 * step, rates=None, watch=None)
    for out, n in zip(calls, (1, 2, 1), strict=True):
        whole.add(out, n)
    before = Interval(Clock(), 8, lambda step: 8 * step, rates=None, watch=None)
    before.add(calls[0], 1)
    sums = IntervalSums()
    sums.restore(json.loads(json.dumps(before.sums.fields())))
    before.add(calls[1], 2)  # which the snapshot does not hold
    after = Interval(Clock(), 8, lambda step: 8 * step, rates=None, watch=None, sums=sums)
    for out, n in zip(calls[1:], (2, 1), strict=True):
        after.add(out, n)
    (wanted,), (found,) = whole.events(4, {}), after.events(4, {})
    names = ("train/loss", "train/skipped_steps", "train/gradient_norm", "data/consumed_samples")
    assert [found.values[name] for name in names] == [wanted.values[name] for name in names]
    after.add(output(5, 1, 0, 7.0), 1)
    (event,) = after.events(5, {})
    assert event.values["train/loss"] == 7.0 and sums.steps == 0


def test_an_interval_begins_anew_with_other_metrics():
    """Those of an objective that has changed: their sums are of fewer steps."""
    sums = IntervalSums()
    sums.restore({"steps": 1, "weight": 8.0, "skipped": 0, "sums": {"loss": 80.0, "f1": 1.0}})
    interval = Interval(Clock(), 8, lambda step: 8 * step, rates=None, watch=None, sums=sums)
    interval.add(output(2, 1, 0, 0.5), 1)
    (event,) = interval.events(2, {})
    assert event.values["train/loss"] == 0.5 and "train/f1" not in event.values


def test_a_run_that_only_skips_is_an_error():
    interval = Interval(Clock(), 8, lambda step: 8 * step, rates=None, watch=None)
    with pytest.raises(DivergedError, match="last 3 steps .* nothing was learned"):
        interval.add(output(3, 3, 3), 3, last=True)
    interval = Interval(Clock(), 8, lambda step: 8 * step, rates=None, watch=None)
    interval.add(output(1, 1, 0), 1)
    interval.add(output(3, 2, 2), 2, last=True)
    with pytest.raises(DivergedError, match="last 50 steps"):
        interval.add(output(51, 48, 48), 48)
    interval = Interval(Clock(), 8, lambda step: 8 * step, rates=None, watch=None)
    scaled = dataclasses.replace(output(3, 3, 3), loss_scale=4096.0)
    with pytest.raises(DivergedError, match=r"lower --learning_rate, lower --loss_scale_initial, or set"):
        interval.add(scaled, 3, last=True)


def test_news_of_a_step_are_a_warning_at_the_next_log_line():
    interval = Interval(Clock(), 8, lambda step: 8 * step, rates=None, watch=None)
    interval.add(StepOutput(1, {"loss": 1.0}, 8.0, 0.1, sums={"loss": 8.0}, news=("Look.",)), 1)
    events = interval.events(1, {})
    assert [(event.kind, event.values.get("message")) for event in events] == [("warning", "Look."), ("train", None)]
    interval.add(StepOutput(2, {"loss": 1.0}, 8.0, 0.1, sums={"loss": 8.0}), 1)
    assert [event.kind for event in interval.events(2, {})] == ["train"]


def test_the_loss_of_samples_without_weight_is_0_and_of_skipped_steps_nan():
    interval = Interval(Clock(), 8, lambda step: 8 * step, rates=None, watch=None)

    def events(step, weight, **more):
        nothing = StepOutput(step, {"loss": math.nan}, weight, 0.0, sums={"loss": 2.0 * weight}, **more)
        interval.add(nothing, 1)
        return interval.events(step, {})

    warning, train = events(1, 0.0)
    assert train.values["train/loss"] == 0.0 and "weight 0" in warning.values["message"]
    (train,) = events(2, 0.0)  # is told once
    assert train.values["train/loss"] == 0.0
    warning, train = events(3, 0.0, skipped=1)
    assert math.isnan(train.values["train/loss"]) and "skipped" in warning.values["message"]
    interval.add(StepOutput(4, {}, 0.0, 0.0, sums={"loss": 0.0}), 1)
    assert events(5, 8.0)[-1].values["train/loss"] == 2.0
