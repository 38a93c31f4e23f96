"""What is made the same on all workers where BatchNormalization is not synchronized: its statistics, nothing else."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest

from tfdist.run.moving_statistics import sync_moving_statistics

STATISTICS = {"moving_mean", "moving_variance", "moving_stddev", "renorm_mean", "renorm_stddev"}


class Counting(keras.layers.Layer):
    """Has a state of its own."""

    def build(self, shape):
        self.rows = self.add_weight(shape=(), initializer="zeros", trainable=False, name="rows")

    def call(self, x):
        return x


def small_model(dtype):
    inner = keras.Sequential(
        [keras.layers.Input((3,)), keras.layers.BatchNormalization(renorm=True, dtype=dtype, name="norm")]
    )
    frozen = keras.layers.Dense(3, trainable=False, name="block_00_mlp_up")  # on a mesh each rank has another part
    return keras.Sequential([keras.layers.Input((3,)), frozen, inner, Counting(), keras.layers.Dropout(0.5)])


def found_after_a_sync(model, first, **runtime):
    """path of a variable that has changed -> its new value less the old one, the same for all elements."""
    before = {variable.path: variable.numpy() for variable in model.variables}
    sync_moving_statistics(model, SimpleNamespace(first_of_stage=lambda: first), SimpleNamespace(**runtime))
    changes = {variable.path: variable.numpy() - before[variable.path] for variable in model.variables}
    return {path: float(change.flat[0]) for path, change in changes.items() if np.any(change)}


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_statistics_of_any_type_become_the_chiefs_and_nothing_else_changes(dtype):
    found = found_after_a_sync(
        small_model(dtype),
        0,
        all_gather=lambda own: np.stack([own, own]),
        broadcast=lambda arrays: [array + np.asarray(1, array.dtype) for array in arrays],
    )
    assert {path.rpartition("/")[2] for path in found} == STATISTICS and set(found.values()) == {1.0}


def test_another_stage_takes_those_of_its_first_rank():
    def all_gather(own):
        return np.stack([own + number for number in range(4)]).astype(own.dtype)

    found = found_after_a_sync(small_model("float32"), 2, all_gather=all_gather)
    assert {path.rpartition("/")[2] for path in found} == STATISTICS and set(found.values()) == {2.0}
