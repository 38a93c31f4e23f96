"""Embeddings that read by the row, against Keras' own."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.models.embedding_rows import read_rows


class Inner(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(50, 4)

    def call(self, x):
        return self.table(x)


def make(dtype):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(dtype)
    try:
        return keras.Sequential(
            [
                keras.layers.Input([3], dtype="int32"),
                Inner(),
                keras.layers.Flatten(),
                keras.layers.Dense(2, dtype="float32"),
            ]
        )
    finally:
        keras.config.set_dtype_policy("float32")


def reads(function, *arguments):
    graph = tf.function(function).get_concrete_function(*arguments).graph
    return [op.type for op in graph.get_operations() if op.type in ("ResourceGather", "GatherV2")]


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_the_same_outputs_and_gradients(dtype):
    whole, by_row = make(dtype), make(dtype)
    read_rows(by_row)
    x = tf.constant([[1, 7, 1], [49, -1, 0]])
    assert reads(by_row, x) == ["ResourceGather"] and reads(whole, x) == ["GatherV2"]
    found = []
    for model in (whole, by_row):
        with tf.GradientTape() as tape:
            y = model(x, training=True)
            loss = tf.reduce_sum(y**2)
        gradient = tf.convert_to_tensor(tape.gradient(loss, model.trainable_variables[0].value))
        found.append((y.numpy(), gradient.numpy()))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_allclose(
        found[0][1], found[1][1], rtol=1e-6 if dtype == "float32" else 0.02, atol=1e-6 if dtype == "float32" else 1e-3
    )


def test_a_saved_model_is_keras_own(tmp_path):
    model = keras.Sequential([keras.layers.Input([3], dtype="int32"), keras.layers.Embedding(9, 2)])
    read_rows(model)
    model.save(tmp_path / "model.keras")
    x = np.array([[0, 8, 3]])
    np.testing.assert_array_equal(keras.models.load_model(tmp_path / "model.keras")(x), model(x))
