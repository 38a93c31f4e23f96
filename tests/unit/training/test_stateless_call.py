"""A model called with given values computes what the model itself does with them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.fuzz.layers import HoldsFunction
from tfdist.training.stateless_call import stateless_call

X = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")


class Model(keras.Model):
    """Leaves it to Keras to tell the layers inside whether they are training."""

    def __init__(self):
        super().__init__()
        self.inner = [
            layers.Dropout(0.5, seed=1),
            layers.BatchNormalization(),
            layers.Dense(3, kernel_regularizer="l2"),
        ]

    def call(self, x, training=False):
        for layer in self.inner:
            x = layer(x)
        if training:
            self.add_loss(ops.sum(x))
        return x


class WithoutTraining(Model):
    def call(self, x):
        return super().call(x)


@pytest.mark.parametrize("kind", [Model, WithoutTraining])
@pytest.mark.parametrize("training", [True, False])
def test_as_the_model_itself(kind, training):
    keras.utils.set_random_seed(0)
    model, copy = kind(), kind()
    for each in (model, copy):
        each(X)
    copy.set_weights([weight + 0.1 for weight in model.get_weights()])
    given = [variable.value for variable in model.trainable_variables]
    states = [variable.value for variable in model.non_trainable_variables]
    before = [variable.numpy() for variable in copy.variables]
    called = stateless_call(copy, given, states, X, training)
    for variable, value in zip(copy.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)
    np.testing.assert_array_equal(called.outputs, model(X, training=training))
    for variable, value in zip(model.non_trainable_variables, called.states, strict=True):
        np.testing.assert_array_equal(variable, value)
    np.testing.assert_array_equal(called.losses, model.losses)


class TriedInItsCall(Model):
    """As tfdist.fit tries a model at its first batch."""

    def call(self, x, training=False):
        if training:
            given = [variable.value for variable in self.trainable_variables]
            stateless_call(self, given, [variable.value for variable in self.non_trainable_variables], x, False)
        return super().call(x)


def test_a_call_that_is_under_way_goes_on():
    """Its layers still learn from it that it is training: the moving mean of BatchNormalization moves."""
    model = TriedInItsCall()
    model(X)
    before = model.inner[1].moving_mean.numpy()
    model(X, training=True)
    assert np.abs(model.inner[1].moving_mean.numpy() - before).max() > 1e-3


def test_other_variables_are_refused():
    model = Model()
    model(X)
    with pytest.raises(ValueError, match="zip"):
        stateless_call(model, [], [variable.value for variable in model.non_trainable_variables], X, True)


def test_a_function_that_a_layer_holds_keeps_none_of_the_values():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), layer := HoldsFunction(2)])
    x, before = tf.ones([3, 2]), layer.times.experimental_get_tracing_count()
    given = stateless_call(model, [tf.zeros([2, 2])], [], x, training=False).outputs
    assert not given.numpy().any() and layer.times.experimental_get_tracing_count() == before
    assert model(x).numpy().all()
