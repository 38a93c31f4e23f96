"""What a pipeline holds and how long it waits, by formula, against the schedules that training follows."""

import itertools

import pytest

from tfdist import flags
from tfdist.config import Config
from tfdist.plan import model_shape
from tfdist.planner.hardware import DEVICES
from tfdist.planner.layout import Layout
from tfdist.planner.memory import memory
from tfdist.planner.pipeline import bubble_fraction, micro_batches_held, micro_batches_waited
from tfdist.planner.time import step_time
from tfdist.training.parallel import pipe_schedule

CASES = [
    (name, stages, micros, chunks)
    for name, stages, micros, chunks in itertools.product(
        ("gpipe", "1f1b"), (2, 3, 4), (1, 2, 3, 4, 8, 9, 12), (1, 2, 3)
    )
    if chunks == 1 or micros % stages == 0
]


@pytest.mark.parametrize(("name", "stages", "micros", "chunks"), CASES)
def test_it_is_as_the_schedule_is(name, stages, micros, chunks):
    parallel = Config().replace(pipe_schedule=name, pipe_chunks=chunks).parallel
    layout = Layout(pipe=stages, micro_batches=micros)
    schedule = pipe_schedule.make_schedule(name, stages, micros, chunks)
    held = [micro_batches_held(parallel, layout, stage) for stage in range(stages)]
    assert held == [live / chunks for live in pipe_schedule.live(schedule)]
    ends = [start + action.units for line in pipe_schedule.timeline(schedule) for start, action in line]
    of_one = sum(action.units for action in schedule[0]) / micros
    waited = max(ends) / of_one - micros
    assert micro_batches_waited(layout.pipe, parallel.pipe_chunks) == pytest.approx(waited)
    assert bubble_fraction(layout.pipe, micros, parallel.pipe_chunks) == pytest.approx(waited / (waited + micros))


def test_without_a_pipeline():
    parallel = Config().replace(pipe_schedule="gpipe").parallel
    assert micro_batches_held(parallel, Layout(micro_batches=8), 0) == 1
    assert micro_batches_waited(1, parallel.pipe_chunks) == 0


def test_the_plan_follows_the_schedule():
    train = ["--source=text", "--sequence_length=256", "--model=transformer", "--model_args=size=gpt2"]
    base = flags.parse([*train, "--steps=1", "--global_batch=8"]).config
    shape, layout = model_shape(base, train, "", 0), Layout(pipe=2, micro_batches=8)

    def of(**changes):
        config = base.replace(**changes)
        return memory(shape, config, layout), step_time(shape, config, layout, DEVICES["h100"], "auto")

    (usual, time), (gpipe, gpipe_time), (_, halved) = of(), of(pipe_schedule="gpipe"), of(pipe_chunks=2)
    assert gpipe.activations > 3 * usual.activations
    assert (gpipe_time.bubble, halved.bubble) == (time.bubble, time.bubble / 2)
    assert halved.tensor > time.tensor
