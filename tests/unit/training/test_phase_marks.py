"""Marks in the training function: they tell the phases and change nothing."""

import itertools
import time

import pytest
import tensorflow as tf

from tests.unit.training.test_step import W, X, Y, batches, make_step, weights
from tfdist.telemetry.phases import PHASES
from tfdist.training import phase_marks
from tfdist.training.phase_marks import MarkTimes, in_step


def slow_batches(size, seconds):
    def wait(x):
        time.sleep(seconds)
        return x

    def slowly(x, y, w):
        return tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), x.shape), y, w

    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False  # how many are made ahead is a matter of chance
    dataset = tf.data.Dataset.from_tensor_slices((X, Y, W)).repeat().batch(size).map(slowly)
    return [iter(dataset.with_options(options))]


@pytest.mark.slow
@pytest.mark.usefixtures("rewritten_graphs")
@pytest.mark.parametrize(
    "options",
    [
        {"skip_non_finite": True, "clip_norm": 0.1},
        {"batch": 48, "accumulation": 3, "dropout": 0.2},
        {"deterministic": True},
        {"jit_compile": True},
        {"as_on_gpu": True},
    ],
)
def test_a_step_with_marks_is_the_same_step(options):
    options, as_on_gpu = dict(options), options.get("as_on_gpu", False)
    options.pop("as_on_gpu", None)
    size = options.get("batch", 16) // options.get("accumulation", 1)
    plain, marked = make_step(optimizer="adamw", **options), make_step(optimizer="adamw", phase_every=2, **options)
    marked._copies_batches |= as_on_gpu  # batches are copied, and marks wait for a value
    without, with_marks = batches(size), batches(size)
    for n in (1, 3, 2, 4, 1, 2):
        expected, found = plain(without, n), marked(with_marks, n)
        assert found.means == expected.means and found.gradient_norm == expected.gradient_norm
        assert expected.call.phases_s is None
    assert weights(marked).tobytes() == weights(plain).tobytes()
    assert marked._function.experimental_get_tracing_count() == 1


def test_of_every_row_of_calls_one_is_sampled():
    step, iterators = make_step(phase_every=4, deterministic=True), batches(16)
    sampled = [step(iterators, 1).call.phases_s is not None for _ in range(16)]
    assert [sum(sampled[row : row + 4]) for row in range(0, 16, 4)] == [1, 1, 1, 1] and sampled[1]
    assert len({sampled[row : row + 4].index(True) for row in range(0, 16, 4)}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_phases_fill_the_call_and_find_the_slow_one(timed, accumulation):
    step = make_step(batch=4 * accumulation, accumulation=accumulation, phase_every=1, deterministic=not timed)
    iterators = slow_batches(4, 0.02)
    step(iterators, 1)
    call = step(iterators, 5).call
    phases = dict(zip(PHASES, call.phases_s, strict=False))
    assert all(seconds > -1e-4 for seconds in phases.values()) and sum(phases.values()) <= call.wall_s
    assert phases["data_wait"] >= 5 * accumulation * 0.02
    assert phases["forward"] > 0 and phases["backward"] > 0 and phases["optimizer"] > 0
    assert phases["gradient_sync"] == 0 == call.sync_s  # of one device


def what_comes_before(tensor):
    """The operations of its graph that must have ended before it is there."""
    found, waiting = set(), [tensor.op]
    while waiting:
        operation = waiting.pop()
        if operation not in found:
            found.add(operation)
            waiting += [*(value.op for value in operation.inputs), *operation.control_inputs]
    return found


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_each_mark_waits_for_the_one_before_it(timed, accumulation, monkeypatch):
    """Marks that wait for the same tensors alone are looked at in any order: on a busy machine, by Python's clock, an
    optimizer took negative time.
    """
    of_graphs = {}

    class Recorded(phase_marks.Marks):
        def __call__(self, after):
            mark = super().__call__(after)
            of_graphs.setdefault(mark.graph, []).append(mark)
            return mark

    monkeypatch.setattr("tfdist.training.measured_step.Marks", Recorded)
    step = make_step(batch=4 * accumulation, accumulation=accumulation, phase_every=1, deterministic=not timed)
    step(batches(4), 2)
    call, one_step, *micro_batches = of_graphs.values()
    assert [len(call), len(one_step), *map(len, micro_batches)] == [2, 6, *[3] * (accumulation > 1)]
    for marks in of_graphs.values():
        for before, mark in itertools.pairwise(marks):
            assert before.op in what_comes_before(mark), (before, mark)
    begin, end = call
    assert all(begin.op in what_comes_before(op.outputs[0]) for op in what_comes_before(end) if "While" in op.type)
    for marks in micro_batches:  # the first waits for what the loop has carried of the marks before
        carried = [op.outputs[0] for op in what_comes_before(marks[0]) if op.type == "Placeholder"]
        assert any(value.dtype == tf.float64 and value.shape == [4] for value in carried)


@pytest.mark.parametrize(
    "wait_s, backward, sync", [(None, 1.0, 1.0), (0.25, 1.75, 0.25)], ids=["by the marks", "by the runtime"]
)
def test_phases_of_the_sums_of_marks(wait_s, backward, sync):
    """One step of two micro-batches: from 10 on they wait 1, copy 2, go forward 3, backward 0.5; 1 to reduce, 4 to
    update."""
    times = MarkTimes(
        data=11.0 + 17.5,
        device=13.0 + 19.5,
        forward=16.0 + 22.5,
        backward=16.5 + 23.0,
        start=10.0,
        local=23.0,
        reduced=24.0,
        total=18.0,
    )
    assert in_step(times, wait_s).tolist() == [2.0, 4.0, 6.0, backward, sync, 4.0]
