"""Metrics that a layer updates in its call."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.keras_fit.metrics_inside import Additions


class Measured(keras.layers.Layer):
    """Counts and adds up its rows."""

    def __init__(self, **options):
        super().__init__(**options)
        self.mean = keras.metrics.Mean(name="mean")

    def call(self, x):
        self.mean.update_state(keras.ops.sum(x, axis=1))
        return x


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_what_a_metric_is_given_is_collected_and_not_kept(policy):
    layer = Measured(dtype=policy)
    layer.mean.total.assign(0.1)  # which half precision would round
    before = [float(variable) for variable in layer.mean.variables]
    additions = Additions([layer])

    @tf.function
    def forward(x):
        with additions.collected():
            layer(x)
        return additions.values

    assert [float(value) for value in forward(tf.ones([4, 3]))] == [12.0, 4.0]
    np.testing.assert_array_equal([float(variable) for variable in layer.mean.variables], before)
