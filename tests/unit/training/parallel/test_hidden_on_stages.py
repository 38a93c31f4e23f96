"""State of which Keras does not know, on the stages of a pipeline, is refused."""

import keras
import pytest
import tensorflow as tf

from tfdist.control.exit_codes import ConfigError
from tfdist.training.parallel.shared_state import refuse_hidden


class Counts(keras.layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.inside = [{"calls": tf.Variable(0)}]

    def call(self, x, training=False):
        if training:
            self.inside[0]["calls"].assign_add(1)
        return x


class Draws(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.generator = tf.random.Generator.from_seed(3)

    def call(self, x):
        return x + self.generator.normal(tf.shape(x))


def model_of(layer):
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), layer])


def test_a_variable_that_a_layer_sets():
    model = model_of(Counts(name="mine"))
    refuse_hidden(model, "--mesh=pipe=2")
    model(tf.zeros([3, 2]))  # sets nothing
    found = "^--mesh=pipe=2, but layer mine sets its weight .*: create it with self.add_weight"
    with pytest.raises(ConfigError, match=found):
        model(tf.zeros([3, 2]), training=True)


def test_a_generator():
    with pytest.raises(ConfigError, match="--mesh=pipe=2, but a layer draws from a tf.random.Generator"):
        refuse_hidden(model_of(Draws()), "--mesh=pipe=2")
    refuse_hidden(model_of(keras.layers.Dropout(0.5)), "--mesh=pipe=2")


class Grows(keras.constraints.Constraint):
    def __init__(self):
        self.updates = tf.Variable(0.0, trainable=False, name="updates")

    def __call__(self, weight):
        return tf.clip_by_value(weight, -self.updates, self.updates.assign_add(1.0))


def test_a_variable_of_a_constraint():
    with pytest.raises(ConfigError, match="--mesh=pipe=2, but a regularizer or constraint .* of its own .updates:0."):
        refuse_hidden(model_of(keras.layers.Dense(2, kernel_constraint=Grows())), "--mesh=pipe=2")
    refuse_hidden(model_of(keras.layers.Dense(2, kernel_constraint="non_neg")), "--mesh=pipe=2")
