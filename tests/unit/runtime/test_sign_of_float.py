"""What stands in for Keras' sign of floats on GPUs gives the same values."""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.compat import keras_tensors

SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, np.inf, -np.inf, np.nan, -np.nan, 3e38, -3e38]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_signs_are_those_of_keras(dtype):
    values = tf.cast(tf.constant(SPECIAL), dtype)
    assert keras_tensors.sign_of_float(values).numpy().tolist() == keras.ops.signbit(values).numpy().tolist()


def test_argmax_is_the_same_and_compares_no_int32():
    values = tf.constant(np.random.default_rng(0).choice(SPECIAL[:8], size=[50, 8]).astype("float32"))
    wanted = keras.ops.argmax(values, axis=-1).numpy().tolist()

    def of_int32():
        function = tf.function(lambda x: keras.ops.argmax(x, axis=-1))
        graph = function.get_concrete_function(values).graph
        assert function(values).numpy().tolist() == wanted
        return [op for op in graph.get_operations() if op.type == "Less" and op.inputs[0].dtype == tf.int32]

    gpu = tf.config.LogicalDevice("/device:GPU:0", "GPU")
    assert of_int32()
    with mock.patch.object(tf.config, "list_logical_devices", lambda kind=None: [gpu]):
        context = keras_tensors.argmax_within_gpus()
    with context:
        assert not of_int32()
    assert of_int32()  # as before
    with keras_tensors.argmax_within_gpus():  # no GPU here
        assert of_int32()
