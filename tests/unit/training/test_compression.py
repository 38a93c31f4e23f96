"""Compression without other workers: what it keeps of a step, and in which order it adds."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist import build
from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.training.parallel.compression import Compression
from tfdist.training.parallel.state_piece import shared_out

BASE = Config().replace(
    strategy="mesh",
    steps=4,
    source="digits",
    model="mlp",
    model_args="widths=(64,)",
    global_batch=16,
    accumulation=1,
    optimizer="sgd",
    on_nan="skip",
    compression_after=1,
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "topk", "powersgd"])
def test_a_skipped_step_carries_nothing_on(kind):
    """As if it had not been: weights and errors are those of the same steps without it."""
    keras.backend.clear_session()
    config = BASE.replace(compression=kind)
    job = build.compose(config, build.start_runtime(config, Cluster()))
    compared = [*job.model.trainable_variables, *job.step.update.compression.variables.values()]
    changed = [*compared, *job.optimizer.variables, job.step.counter]
    at_first = [variable.numpy() for variable in changed]

    def after(batches):
        for variable, value in zip(changed, at_first, strict=True):
            variable.assign(value)
        output = job.step([iter(tf.data.Dataset.from_tensor_slices(batches))], len(batches[0]))
        return output, [variable.numpy() for variable in compared]

    random = np.random.default_rng(0)
    x, y, w = (
        random.normal(size=(4, 16, 8, 8, 1)).astype("float32"),
        random.integers(0, 10, (4, 16)).astype("int32"),
        np.ones((4, 16), "float32"),
    )
    x[2, 3] = np.nan
    good = [0, 1, 3]
    output, with_it = after((x, y, w))
    _, without = after((x[good], y[good], w[good]))
    assert output.skipped == 1
    assert any(np.abs(value).max() > 0 for value in without[4:])
    for ours, theirs in zip(with_it, without, strict=True):
        np.testing.assert_array_equal(ours, theirs)


class Members:
    """The group as one of its members sees it, whose others hold the same."""

    def __init__(self, size):
        self.size = size

    def all_gather(self, x):
        return tf.concat([x] * self.size, 0)


def test_topk_adds_member_by_member():
    """A GPU adds what goes to one place in one operation in any order, so that workers would round differently."""
    variable = keras.Variable(np.zeros((64, 32), "float32"))
    compression = Compression("topk", [variable], Members(3), after=0)
    gradient = np.random.default_rng(0).normal(size=(64, 32)).astype("float32")
    run = tf.function(lambda tensor: compression([tensor]), autograph=False)
    (total,), ends = run(gradient)
    sent = gradient - ends["compression_error_0000"]
    np.testing.assert_allclose(total, 3 * sent, rtol=1e-6)
    assert np.count_nonzero(sent) == round(0.2 * gradient.size)
    graph = run.get_concrete_function(tf.TensorSpec((64, 32))).graph
    adding = [operation for operation in graph.get_operations() if operation.type in ("ScatterNd", "TensorScatterAdd")]
    assert max(
        operation.inputs[1 if operation.type == "TensorScatterAdd" else 0].shape[0] for operation in adding
    ) == round(0.2 * gradient.size)


def test_the_bytes_that_are_shown_are_those_that_were_sent():
    variable = keras.Variable(np.zeros((64, 32), "float32"))
    for kind, after in (("powersgd", 3), ("powersgd", 0), ("int8", 3)):  # int8 begins at once
        compression = Compression(kind, [variable], Members(3), after)
        whole, less = 4.0 * 64 * 32, float(compression.bytes())
        sent = [compression.figures(steps)["compression/sent_bytes"] for steps in (1, 3, 4)]
        assert sent == ([whole, whole, less] if compression.after else [less] * 3)


def test_carried_errors_of_other_workers_are_shared_out():
    rows = np.arange(6, dtype="float32").reshape(3, 2)
    np.testing.assert_array_equal(shared_out(rows, 3), rows)
    np.testing.assert_array_equal(shared_out(rows, 2), [[3, 4.5], [3, 4.5]])


class Alone:
    """The group of one member."""

    size = 1

    def all_gather(self, x):
        return x

    def all_reduce(self, x):
        return x


def steps_of(kind, gradients):
    """Yields (sum, carried error) of each step that a single worker makes."""
    compression = Compression(kind, [keras.Variable(np.zeros(gradients[0].shape, "float32"))], Alone(), after=0)
    run = tf.function(lambda tensor: compression([tensor]), autograph=False)
    for gradient in gradients:
        (total,), ends = run(gradient)
        compression.keep(ends)
        yield total.numpy(), ends["compression_error_0000"].numpy()


@pytest.mark.parametrize("rows, used", [(2, 2), (3, 3), (7, 7), (16, 3)])
def test_powersgd_loses_nothing_of_a_matrix_with_few_independent_rows(rows, used):
    """Its 8 directions are then more than there are: rounding must not count as a direction."""
    random = np.random.default_rng(0)
    gradients = np.zeros((25, rows, 512), "float32")
    gradients[:, :used] = random.normal(size=(25, used, 512))
    for gradient, (total, error) in zip(gradients, steps_of("powersgd", gradients), strict=True):
        np.testing.assert_allclose(total, gradient, rtol=0, atol=1e-4)
        assert np.abs(error).max() < 1e-4


def test_powersgd_finds_new_directions_after_gradients_of_zeros_and_of_few_rows():
    random = np.random.default_rng(0)
    direction = random.normal(size=(64, 6)) @ random.normal(size=(6, 64))
    one_row = np.zeros((64, 64))
    one_row[5] = random.normal(size=64)
    gradients = np.array([np.zeros((64, 64)), one_row, *[direction] * 20], "float32")
    totals = [total for total, _ in steps_of("powersgd", gradients)]
    np.testing.assert_array_equal(totals[0], 0)
    np.testing.assert_allclose(totals[1], one_row, atol=1e-4)
    np.testing.assert_allclose(totals[-1], direction, atol=1e-3)


def test_topk_sends_nan_and_keeps_none():
    """So that the step is found not to be finite, and skipped."""
    for row in range(8):
        gradient = np.random.default_rng(row).normal(size=(64, 64)).astype("float32")
        gradient[row] = np.nan
        ((total, _),) = steps_of("topk", [gradient])
        assert np.isnan(total[row]).all()
