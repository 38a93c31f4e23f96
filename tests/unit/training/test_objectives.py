"""Objectives against Keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.config import ModelConfig
from tfdist.control.exit_codes import ConfigError
from tfdist.training.objectives import Scores, classification, make_objective, regression

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("shape", [(6,), (3, 5)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_classification(shape, smoothing):
    logits, y = RANDOM.normal(size=(*shape, 7)).astype("float32"), RANDOM.integers(0, 7, shape)
    scores = classification(smoothing)(tf.constant(logits), tf.constant(y), tf.ones(shape[:1]))
    expected = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=smoothing, reduction=None)(np.eye(7)[y], logits)
    np.testing.assert_allclose(scores.losses, expected, rtol=1e-5)
    np.testing.assert_array_equal(scores.metrics["accuracy"], logits.argmax(-1) == y)
    assert scores.weights.shape == shape


def test_token_weights_are_kept():
    weights = tf.constant([[1.0, 0.0], [1.0, 1.0]])
    scores = classification()(tf.zeros([2, 2, 3]), tf.zeros([2, 2], tf.int32), weights)
    np.testing.assert_array_equal(scores.weights, weights)


def test_regression_takes_targets_with_and_without_a_last_dim():
    outputs = tf.constant([[1.0], [2.0]])
    for y in (tf.constant([3.0, 2.0]), tf.constant([[3.0], [2.0]])):
        scores = regression()(outputs, y, tf.ones([2]))
        np.testing.assert_allclose(scores.losses, [4.0, 0.0])


def branching(outputs, y, w):
    losses = (outputs[:, 0] - y) ** 2
    if tf.reduce_max(losses) > 4:
        losses = tf.sqrt(losses)
    return Scores(losses, w, {})


def test_own_objectives_may_branch_on_tensors():
    objective = tf.function(make_objective(ModelConfig(objective=f"{__name__}:branching"), tf.TensorSpec([], tf.float32)), autograph=False)
    for outputs, expected in (([1.0, 2.0], [1.0, 4.0]), ([1.0, 3.0], [1.0, 3.0])):
        np.testing.assert_allclose(objective(tf.constant(outputs)[:, None], tf.zeros([2]), tf.ones([2])).losses, expected)


def test_choice():
    assert make_objective(ModelConfig(), tf.TensorSpec([], tf.int32))(tf.zeros([1, 2]), tf.constant([0]), tf.ones([1])).metrics.keys() == {"accuracy"}
    assert make_objective(ModelConfig(), tf.TensorSpec([], tf.float32))(tf.zeros([1, 1]), tf.constant([0.0]), tf.ones([1])).metrics.keys() == {"absolute_error"}
    for name in ("hinge", "no_such_module:f", "math:no_such_function"):
        with pytest.raises(ConfigError, match=name.partition(":")[0]):
            make_objective(ModelConfig(objective=name), tf.TensorSpec([], tf.int32))
