"""The order of a backward pass: what it hangs on, and that it changes no result."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.training.backward_order import age, made_after, weights_first
from tfdist.training.parallel.recompute import recomputed


def dense(tied=False):
    first = keras.layers.Dense(4, activation="tanh")
    return keras.Sequential(
        [
            keras.layers.Input([4]),
            first,
            first if tied else keras.layers.Dense(4, activation="tanh"),
            keras.layers.Dense(4),
        ]
    )


def recurrent():
    return keras.Sequential(
        [keras.layers.Input([4]), keras.layers.Reshape([2, 2]), keras.layers.LSTM(4), keras.layers.Dense(2)]
    )


def images():
    return keras.Sequential(
        [
            keras.layers.Input([4]),
            keras.layers.Reshape([2, 2, 1]),
            keras.layers.Conv2D(3, 2, padding="same"),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )


def again():
    class Again(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = [keras.layers.Dense(4, activation="tanh") for _ in range(3)]
            for layer in self.inner:
                layer.build([None, 4])

        def call(self, x):
            for layer in self.inner:
                x = recomputed(layer, x, layer.trainable_variables, [], self)
            return x

    return Again()


def gradients_of(model, function):
    """`function`(gradients, what the backward pass began with) at the end of a backward pass."""

    @tf.function(autograph=False)
    def gradients(x):
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(tf.square(model(x, training=True)))
        seed = tf.ones_like(total)
        found = tape.gradient(total, [variable.value for variable in model.trainable_variables], seed)
        function(found, seed)
        return [tf.convert_to_tensor(gradient) for gradient in found]

    return [
        gradient.numpy()
        for gradient in gradients(tf.constant(np.random.default_rng(0).normal(size=(8, 4)), tf.float32))
    ]


@pytest.mark.parametrize(
    "make",
    [dense, lambda: dense(tied=True), recurrent, images, pytest.param(again, marks=pytest.mark.slow)],
    ids=["dense", "tied", "recurrent", "images", "recomputed"],
)
def test_the_order_changes_no_gradient(make):
    keras.utils.set_random_seed(0)
    model = make()
    free, ordered = (gradients_of(model, function) for function in (lambda *_: None, weights_first))
    for one, other in zip(free, ordered, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("make", [dense, again], ids=["dense", "recomputed"])
def test_the_gradient_of_an_input_waits_for_that_of_the_weights(make):
    waits = []

    def order(gradients, seed):
        weights_first(gradients, seed)
        for kernel in gradients[0::2]:
            upstream = max(kernel.op.inputs, key=lambda tensor: tensor.op._id)
            users = [user for user in upstream.consumers() if user.type == "MatMul" and user is not kernel.op]
            waits.extend(kernel.op.name in [other.name for other in user.control_inputs] for user in users)

    gradients_of(make(), order)
    assert waits and all(waits), waits


@pytest.mark.parametrize(
    "first, second, waits", [(-1, 0, True), (0, -1, False)], ids=["in the order of the pass", "against it"]
)
def test_a_gradient_can_be_made_to_wait_for_an_older_one_only(first, second, waits):
    def order(gradients, seed):
        kernels = gradients[0::2]
        made_after(kernels[second], tf.identity(kernels[first]), age(kernels[first]))
        assert bool(kernels[second].op.control_inputs) is waits

    assert all(np.isfinite(gradient).all() for gradient in gradients_of(dense(), order))
