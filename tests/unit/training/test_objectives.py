"""Objectives against Keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.config import ModelConfig
from tfdist.control.exit_codes import ConfigError
from tfdist.training.objectives import Scores, classification, make_objective, regression, scores_spec
from tfdist.training.own_objective import own_objective

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("shape", [(6,), (3, 5)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_classification(shape, smoothing):
    logits, y = RANDOM.normal(size=(*shape, 7)).astype("float32"), RANDOM.integers(0, 7, shape)
    scores = classification(smoothing)(tf.constant(logits), tf.constant(y), tf.ones(shape[:1]))
    expected = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=smoothing, reduction=None)(
        np.eye(7)[y], logits
    )
    np.testing.assert_allclose(scores.losses, expected, rtol=1e-5)
    np.testing.assert_array_equal(scores.metrics["accuracy"], logits.argmax(-1) == y)
    assert scores.weights.shape == shape


def test_what_is_alone_in_a_list_is_taken_out_of_it_as_keras_does():
    x = keras.Input([3])
    spec = tf.TensorSpec([4, 3]), tf.TensorSpec([4], tf.int32), tf.TensorSpec([4])
    scores = scores_spec(keras.Model(x, [keras.layers.Dense(2)(x)]), classification(), spec)
    assert scores.losses.shape.rank == 1


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


class OwnLoss(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return y_pred


@pytest.mark.parametrize(
    "loss",
    [
        keras.losses.sparse_categorical_crossentropy,
        keras.losses.SparseCategoricalCrossentropy,
        keras.losses.SparseCategoricalCrossentropy(reduction=None),
        OwnLoss(),
    ],
)
def test_a_loss_of_keras_is_told_how_to_become_an_objective(loss):
    with pytest.raises(ConfigError, match=r"a loss of Keras.* Scores\(loss\(y, outputs\), w"):
        own_objective("mine:loss", loss)


def test_own_objectives_may_branch_on_tensors():
    objective = tf.function(
        make_objective(ModelConfig(objective=f"{__name__}:branching"), tf.TensorSpec([], tf.float32)), autograph=False
    )
    for outputs, expected in (([1.0, 2.0], [1.0, 4.0]), ([1.0, 3.0], [1.0, 3.0])):
        np.testing.assert_allclose(
            objective(tf.constant(outputs)[:, None], tf.zeros([2]), tf.ones([2])).losses, expected
        )


def test_choice():
    assert make_objective(ModelConfig(), tf.TensorSpec([], tf.int32))(
        tf.zeros([1, 2]), tf.constant([0]), tf.ones([1])
    ).metrics.keys() == {"accuracy"}
    assert make_objective(ModelConfig(), tf.TensorSpec([], tf.float32))(
        tf.zeros([1, 1]), tf.constant([0.0]), tf.ones([1])
    ).metrics.keys() == {"absolute_error"}
    for name in ("hinge", "no_such_module:f", "math:no_such_function"):
        with pytest.raises(ConfigError, match=name.partition(":")[0]):
            make_objective(ModelConfig(objective=name), tf.TensorSpec([], tf.int32))


def test_regression_with_weights_of_tokens():
    """As many tokens as samples: nothing may be broadcast by chance."""
    outputs, y, w = (RANDOM.normal(size=shape).astype("float32") for shape in ((4, 4), (4, 4), (4, 4)))
    scores = regression()(tf.constant(outputs), tf.constant(y), tf.constant(w))
    np.testing.assert_allclose(scores.losses, (outputs - y) ** 2, rtol=1e-6)
    scores = regression()(tf.constant(outputs)[..., None], tf.constant(y), tf.constant(w))
    np.testing.assert_allclose(scores.losses * scores.weights, w * (outputs - y) ** 2, rtol=1e-5)
    scores = regression()(tf.constant(outputs), tf.constant(y), tf.constant(w[0]))
    np.testing.assert_allclose(scores.losses, np.mean((outputs - y) ** 2, 1), rtol=1e-6)


def test_regression_of_one_sample_where_only_some_shapes_know_it():
    scores = tf.function(
        regression(), input_signature=[tf.TensorSpec([None, 1]), tf.TensorSpec([1]), tf.TensorSpec([1])]
    )(tf.constant([[3.0]]), tf.constant([1.0]), tf.ones([1]))
    assert scores.losses.numpy().tolist() == [4.0]


@pytest.mark.parametrize(
    "outputs, y, w, words",
    [
        ((4, 1), (4, 1), (4, 4), "weights of shape"),
        ((4,), (4,), (4, 4), "weights of shape"),
        ((4, 3), (4, 3), (4, 1), "weights of shape"),
        ((4, 3), (4,), (4,), "targets of shape"),
        ((4, 3, 2), (4, 2, 3), (4,), "targets of shape"),
    ],
)
def test_regression_refuses_what_does_not_fit(outputs, y, w, words):
    with pytest.raises(ConfigError, match=words):
        regression()(tf.zeros(outputs), tf.zeros(y), tf.ones(w))


def test_classification_refuses_weights_that_do_not_fit():
    with pytest.raises(ConfigError, match="The losses have shape"):
        classification()(tf.zeros([4, 3]), tf.zeros([4], tf.int32), tf.ones([4, 4]))
    scores = classification()(tf.zeros([2, 3, 4, 5]), tf.zeros([2, 3, 4], tf.int32), tf.constant([[1.0, 2.0, 3.0]] * 2))
    np.testing.assert_array_equal(scores.weights[0, :, 0], [1, 2, 3])


def test_own_objectives_with_weights_of_another_shape_are_refused():
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    spec = (tf.TensorSpec([None, 2]), tf.TensorSpec([None]), tf.TensorSpec([None]))
    with pytest.raises(ConfigError, match="they must be the same"):
        scores_spec(model, lambda outputs, y, w: Scores(outputs[:, 0] - y, w[:, None], {}), spec)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint64"])
def test_labels_of_any_whole_type(dtype):
    logits, y = RANDOM.normal(size=(6, 7)).astype("float32"), RANDOM.integers(0, 7, 6)
    expected = classification()(tf.constant(logits), tf.constant(y), tf.ones([6]))
    found = classification()(tf.constant(logits), tf.constant(y.astype(dtype)), tf.ones([6]))
    np.testing.assert_array_equal(found.losses, expected.losses)
    np.testing.assert_array_equal(found.metrics["accuracy"], expected.metrics["accuracy"])


@pytest.mark.parametrize(
    ("objective", "spec", "kind"),
    [
        ("auto", tf.TensorSpec([], tf.string), "string"),
        ("regression", tf.TensorSpec([], tf.complex64), "complex64"),
        ("classification", (tf.TensorSpec([]), tf.TensorSpec([])), "several tensors"),
    ],
)
def test_targets_that_are_no_numbers(objective, spec, kind):
    with pytest.raises(ConfigError, match=f"--objective={objective} takes one tensor of numbers, but .* is {kind}"):
        make_objective(ModelConfig(objective=objective), spec)
