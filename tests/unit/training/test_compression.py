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

    def after(batches):
        keras.backend.clear_session()
        config = BASE.replace(compression=kind)
        job = build.compose(config, build.start_runtime(config, Cluster()))
        output = job.step([iter(tf.data.Dataset.from_tensor_slices(batches))], len(batches[0]))
        return output, [
            variable.numpy()
            for variable in (*job.model.trainable_variables, *job.step.update.compression.variables.values())
        ]

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


def test_carried_errors_of_other_workers_are_shared_out():
    rows = np.arange(6, dtype="float32").reshape(3, 2)
    np.testing.assert_array_equal(shared_out(rows, 3), rows)
    np.testing.assert_array_equal(shared_out(rows, 2), [[3, 4.5], [3, 4.5]])
