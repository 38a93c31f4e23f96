"""Batch normalization in one operation, against Keras' own."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.models.fused_batch_norm import fuse_batch_norm


class Inner(keras.layers.Layer):
    def __init__(self, **options):
        super().__init__()
        self.norm = keras.layers.BatchNormalization(**options)

    def build(self, shape):
        self.norm.build(shape)

    def call(self, x, training=None):
        return self.norm(x, training=training)


def make(dtype, shape=(5, 4, 3), **options):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(dtype)
    try:
        model = keras.Sequential([keras.layers.Input(shape), Inner(**options)])
        for number, variable in enumerate(model.variables):
            variable.assign(np.random.default_rng(number).uniform(0.5, 1.5, variable.shape))
        return model
    finally:
        keras.config.set_dtype_policy("float32")


def operations(model, x):
    return [
        op.type for op in tf.function(lambda x: model(x, training=True)).get_concrete_function(x).graph.get_operations()
    ]


@pytest.mark.parametrize("options", [{}, {"scale": False}, {"center": False, "momentum": 0.7, "epsilon": 1e-2}])
@pytest.mark.parametrize("dtype, bound", [("float32", 2e-5), ("mixed_bfloat16", 0.05)])
@pytest.mark.parametrize("samples", [1, 6])
def test_the_same_outputs_statistics_and_gradients(dtype, bound, options, samples):
    x = tf.constant(np.random.default_rng(1).normal(2.0, 3.0, (samples, 5, 4, 3)), tf.float32)
    found = []
    for fused in (False, True):
        model = make(dtype, **options)
        if fused:
            fuse_batch_norm(model)
        assert ("FusedBatchNormV3" in operations(model, x)) is fused
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x, training=True)
            loss = tf.reduce_sum(tf.cast(y, tf.float32) ** 3)
        gradients = tape.gradient(loss, [x, *(variable.value for variable in model.trainable_variables)])
        found.append(
            [y, *gradients, *(variable.value for variable in model.non_trainable_variables), model(x, training=False)]
        )
        assert y.dtype == model.layers[-1].compute_dtype
    assert len(found[0]) > 4
    for own, other in zip(*found, strict=True):
        own, other = np.asarray(own, "float64"), np.asarray(other, "float64")
        np.testing.assert_allclose(other, own, rtol=bound, atol=bound * max(1.0, np.abs(own).max()))


@pytest.mark.parametrize(
    "dtype, shape, options",
    [
        ("float32", (7,), {}),
        ("float32", (5, 4, 3), {"axis": 1}),
        ("float32", (5, 4, 3), {"renorm": True}),
        ("bfloat16", (5, 4, 3), {}),
        ("float16", (5, 4, 3), {}),
    ],
)
def test_others_are_left_alone(dtype, shape, options):
    model = make(dtype, shape, **options)
    fuse_batch_norm(model)
    assert "FusedBatchNormV3" not in operations(model, tf.ones([2, *shape]))


def test_frozen_layers_use_their_averages():
    model = make("float32")
    fuse_batch_norm(model)
    model.layers[-1].norm.trainable = False
    x = tf.constant(np.random.default_rng(1).normal(size=(2, 5, 4, 3)), tf.float32)
    np.testing.assert_array_equal(model(x, training=True), model(x, training=False))


@pytest.mark.parametrize("fused", [False, True])
def test_large_offsets_keep_the_variance(fused):
    x = (2000.0 + np.random.default_rng(1).normal(size=(16, 5, 4, 3))).astype("float32")
    model = make("float32", momentum=0.0)
    if fused:
        fuse_batch_norm(model)
    model(tf.constant(x), training=True)
    exact = x.astype("float64")
    np.testing.assert_allclose(model.layers[-1].norm.moving_mean.numpy(), exact.mean((0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(model.layers[-1].norm.moving_variance.numpy(), exact.var((0, 1, 2)), rtol=1e-5)
