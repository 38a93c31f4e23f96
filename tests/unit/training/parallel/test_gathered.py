"""Layers that gather their variables when they are called, as with --zero=3: in a group of one."""

import keras
import numpy as np
import tensorflow as tf

from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.runtime.mesh_runtime import MeshRuntime
from tfdist.training.parallel.gathered import gather_layers
from tfdist.training.parallel.shards import shard_variables


class Scaled(keras.layers.Layer):
    """Has a weight of its own, and a layer with others."""

    def __init__(self, inner, **options):
        super().__init__(**options)
        self.inner = inner

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="random_normal", name="scale")
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x * self.scale) + self.scale


def test_a_layer_with_weights_beside_layers_with_weights():
    """As the embedding of a vision transformer; and one in another."""
    keras.utils.set_random_seed(0)
    inner = keras.Sequential([keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Dense(5)])
    model = keras.Sequential(
        [keras.Input((3, 5)), Scaled(Scaled(inner)), keras.layers.Flatten(), keras.layers.Dense(2)]
    )
    x = np.random.default_rng(0).normal(size=(4, 3, 5)).astype("float32")
    moving = [variable.numpy() for variable in model.non_trainable_variables]

    @tf.function(autograph=False)
    def gradients(sources):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        return loss, tape.gradient(loss, sources)

    def state():
        return [variable.numpy() for variable in model.non_trainable_variables]

    variables = model.trainable_variables
    expected, whole = gradients([variable.value for variable in variables])
    moved = state()
    for variable, value in zip(model.non_trainable_variables, moving, strict=True):
        variable.assign(value)
    groups = [MeshRuntime.create(Config().replace(strategy="mesh"), Cluster()).group("data")] * len(variables)
    shards = shard_variables(variables, groups)
    gather_layers(model, variables, shards, groups)
    found, pieces = gradients([shard.value for shard in shards])
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for piece, gradient in zip(pieces, whole, strict=True):
        np.testing.assert_allclose(piece, np.ravel(gradient), rtol=1e-4, atol=1e-6)
    for one, other in zip(state(), moved, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
