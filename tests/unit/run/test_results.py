"""What is left for others has all that a model has learned, or a sentence says what is missing."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.artifacts import state
from tfdist.config import Config
from tfdist.run import results


class Counts(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.count = tf.Variable(0.0, trainable=False, name="count")

    def call(self, x):
        return x + self.count


def counting():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), Counts()])


@dataclasses.dataclass
class Made:
    """What is asked of a job."""

    model: keras.Model
    config: Config
    warnings: list[str] = dataclasses.field(default_factory=list)


@pytest.mark.parametrize(("formats", "warned"), [("keras,saved_model", True), ("saved_model", False), ("none", False)])
def test_what_a_file_cannot_hold_is_told(formats, warned):
    job = Made(counting(), Config().replace(export=formats), ["before"])
    first, *others = results.exportable(job).warnings
    assert first == "before" and ["tf.Variable 'count:0' of a layer" in other for other in others] == [True] * warned


def test_what_layers_keep_is_exported(monkeypatch):
    trained = counting()
    trained.layers[-1].count.assign(3.0)
    monkeypatch.setattr(results, "build_model", lambda *_: counting())
    split = type("Split", (), {"element_spec": (None, None), "num_classes": 2})
    job = type("Job", (), {"config": Config(), "train_split": split})
    weights = {
        key: np.asarray(state.tf_variable(each))
        for key, each in state.collect(trained, keras.optimizers.SGD(), {}).items()
    }
    copy = results._plain_model(job, weights)
    np.testing.assert_array_equal(copy(tf.ones([1, 2])), trained(tf.ones([1, 2])))
