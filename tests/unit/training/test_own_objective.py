"""A user's objective that is none is told so in a sentence, with the user's line where it fails."""

from __future__ import annotations

import math

import keras
import pytest
import tensorflow as tf

from tfdist import build
from tfdist.compat import keras_random
from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError
from tfdist.training.own_objective import own_objective
from tfdist.training.scores import Scores


def keras_style(y_true, y_pred):
    return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)


def fails(outputs, y, w):
    return outputs["logits"]


def one_loss(outputs, y, w):
    return Scores(tf.reduce_mean(outputs), tf.reduce_mean(w), {})


def a_tensor(outputs, y, w):
    return keras_style(y, outputs)


def other_weights(outputs, y, w):
    return Scores(outputs, w, {})


def other_metric(outputs, y, w):
    return Scores(outputs[:, 0], w, {"all": outputs})


def branches(outputs, y, w):
    if tf.reduce_sum(w) > 1:  # noqa: SIM108
        losses = outputs[:, 0]
    else:
        losses = -outputs[:, 0]
    return losses, w, {}


def no_weights(outputs, y, w):
    return Scores(outputs[:, 0], None, {})


def a_number(outputs, y, w):
    return Scores(outputs[:, 0], w, {"m": 3})


def text(outputs, y, w):
    return Scores(tf.strings.as_string(outputs[:, 0]), w, {})


def whole(outputs, y, w):
    return Scores(tf.cast(outputs[:, 0], tf.int32), w, {})


def unnamed(outputs, y, w):
    return Scores(outputs[:, 0], w, {3: w})


def of_other_types(outputs, y, w):
    return Scores(tf.cast(outputs[:, 0], tf.float64), w > 0, {"m": y})


def traced(function):
    objective = own_objective(f"mine:{function.__name__}", function)
    return tf.function(objective, autograph=False).get_concrete_function(
        tf.TensorSpec([None, 4]), tf.TensorSpec([24], tf.int32), tf.TensorSpec([24])
    )


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            keras_style,
            (
                r"--objective=mine:keras_style takes \(y_true, y_pred\): an objective is a function \(outputs, y, w\)"
                r" that returns Scores.* reduction=None\.$"
            ),
        ),
        (fails, r"--objective=mine:fails failed at .*test_own_objective\.py:\d+, in fails: TypeError: "),
        (one_loss, r"returned one loss for the whole batch"),
        (a_tensor, r"--objective=mine:a_tensor returned \w*Tensor: an objective is"),
        (other_weights, r"losses of shape \(None, 4\), but weights of shape \(24,\)"),
        (other_metric, r"but all of shape \(None, 4\)"),
        (no_weights, r"returned NoneType for weights: give a float32 tensor"),
        (a_number, r"losses of shape \(None,\), but m of shape \(\)"),
        (text, r"returned string for losses: give"),
        (whole, r"returned int32 for losses, which have no gradient: give"),
        (unnamed, r"has a metric called 3: give each a name"),
    ],
)
def test_what_is_no_objective(function, words):
    with pytest.raises(ConfigError, match=words):
        traced(function)


def test_what_is_one():
    scores = traced(of_other_types)(tf.ones([24, 4]), tf.zeros([24], tf.int32), tf.ones([24]))
    assert {part.dtype for part in tf.nest.flatten(scores)} == {tf.float32}
    assert traced(branches)(tf.ones([24, 4]), tf.zeros([24], tf.int32), tf.ones([24])).losses.shape == 24


def test_negative_weights_are_none():
    """A batch whose weights come to less than 0 would be learned from with the wrong sign, or not at all."""
    objective = own_objective("mine:signed", lambda outputs, y, w: Scores(outputs[:, 0], w, {}))
    given = tf.constant([1.0, -2.0, 0.0])
    assert objective(tf.ones([3, 4]), given, given).weights.numpy().tolist() == [1.0, -math.inf, 0.0]


def noisy(outputs, y, w):
    outputs += keras.random.normal(tf.shape(outputs))
    return keras_style(y, outputs), w, {}


@pytest.mark.parametrize("name, sets", [(f"{__name__}:noisy", True), ("classification", False)])
def test_what_it_draws_without_a_generator_is_set_in_each_step(name, sets):
    """With a model of Keras' own layers, which draws nothing."""
    config = Config().replace(
        strategy="one_device", source="digits", model="mlp", global_batch=8, objective=name, steps=2
    )
    job = build.compose(config, build.start_runtime(config, Cluster()))
    state = keras_random.global_seed_generator()
    assert any(state is not None and each is state.state.value for each in job.step.replica.seeds) == sets


@pytest.mark.parametrize(
    "name", ["", "loss", "weight", "skipped", "gradient_norm", "regularization", "stop", "samples", "learning_rate"]
)
def test_a_metric_has_a_name_of_its_own(name):
    """Under another's it would stand in its place: in the vectors of a step, and in what is shown."""

    def objective(outputs, y, w):
        return Scores(outputs[:, 0], w, {name: outputs[:, 0]})

    with pytest.raises(ConfigError, match=f"--objective=mine:objective has a metric called '{name}'"):
        own_objective("mine:objective", objective)(tf.ones([2, 1]), tf.zeros([2]), tf.ones([2]))
