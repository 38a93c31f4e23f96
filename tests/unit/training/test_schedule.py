"""Schedules against an independent NumPy formula."""

import math

import pytest

from tfdist.config import ScheduleConfig
from tfdist.training.schedule import Schedule


def reference(shape, peak, warmup, end, fraction, floor, step):
    if step < warmup:
        return peak * (step + 1) / warmup
    if shape == "constant":
        return peak
    start = max(warmup, round(end * (1 - fraction))) if shape == "wsd" else warmup
    t = min(max((step - start) / (end - start), 0), 1)
    return peak * (floor + (1 - floor) * ((1 + math.cos(math.pi * t)) / 2 if shape == "cosine" else 1 - t))


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup, floor", [(0, 0.0), (10, 0.1)])
def test_schedule(shape, warmup, floor):
    config = ScheduleConfig(
        learning_rate=0.3, schedule=shape, warmup_steps=warmup, decay_fraction=0.2, min_learning_rate_ratio=floor
    )
    schedule = Schedule.create(config, total_steps=100)
    for step in (0, 1, 9, 10, 11, 50, 79, 80, 81, 99, 100, 1000):
        assert float(schedule(step)) == pytest.approx(
            reference(shape, 0.3, warmup, 100, 0.2, floor, step), rel=1e-5, abs=1e-8
        ), step
