"""The values of a train event."""

import numpy as np
import pytest

from tfdist.telemetry.timer import Clock
from tfdist.training.interval import Interval
from tfdist.training.step import StepOutput


def test_pauses_are_told_once_and_take_no_time_from_the_speed():
    now = [0.0]
    clock = Clock(lambda: now[0])
    clock.restore({"seconds": 100.0, "pauses": {"saving": 7.0}})  # of earlier attempts
    interval = Interval(clock, 8, lambda step: 8 * step)
    clock.start()

    def event(step, train, **pauses):
        now[0] += train
        for name, seconds in pauses.items():
            with clock.pause(name):
                now[0] += seconds
        fields = dict.fromkeys(StepOutput._fields, 0) | {"step": step, "sums": {"loss": 4.0}, "weight": 2.0, "compute_s": np.zeros(1), "call": None}
        interval.add(StepOutput(**fields), 4)
        return interval.event(step, {"train/learning_rate": 0.1}).values

    first, second, third = event(4, 2.0, evaluation=5.0, saving=1.0), event(8, 4.0), event(12, 2.0, saving=0.5)
    assert [values["perf/steps_per_s"] for values in (first, second, third)] == pytest.approx([2.0, 1.0, 2.0])
    assert [{name: value for name, value in values.items() if name.startswith("pause/")} for values in (first, second, third)] == [
        {"pause/saving_s": 1.0, "pause/evaluation_s": 5.0}, {}, {"pause/saving_s": 0.5}]
