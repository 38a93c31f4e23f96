"""A number for each row, added to as many channels as there are rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src import backend

from tfdist.compat.keras_addition import add_rows_to_rows

SHAPES = [
    ((4, 4), (4, 1)),
    ((1, 4), (4, 1)),
    ((4, 4, 3), (4, 1, 1)),
    ((4, 3, 4), (4, 1, 1)),
    ((4, 4), (4,)),
    ((4, 4), (1, 4)),
    ((2, 4, 3), (1, 4, 1)),
    ((4, 4), (4, 4)),
    ((4, 4), ()),
    ((1, 4, 4), (1, 4, 1)),
    ((1, 2, 4, 4), (1, 1, 4, 1)),
    ((1, 4, 3, 4), (1, 4, 1, 1)),
    ((1, 1, 4), (1, 4, 1)),
]


@pytest.mark.parametrize("one, other", SHAPES)
def test_numbers_of_rows_are_added_to_their_rows(one, other):
    add_rows_to_rows()
    random = np.random.default_rng(0)
    a, b = (tf.constant(random.normal(size=shape), tf.float32) for shape in (one, other))
    np.testing.assert_array_equal(keras.ops.add(a, b), a + b)
    np.testing.assert_array_equal(tf.function(keras.ops.add)(a, b), a + b)
    np.testing.assert_array_equal(keras.layers.Add()([a, b]) if other == one else keras.ops.add(b, a), a + b)


@pytest.mark.parametrize(
    "one, other",
    [
        ((2, 4, 4), (4, 1)),
        ((4, 4), (4, 1)),
        ((1, 4), (4, 1)),
        ((2, 3, 4, 4), (1, 1, 4, 1)),
        ((1, 3, 4, 4), (1, 1, 4, 1)),
        ((2, 4, 3, 4), (1, 4, 1, 1)),
        ((1, 4, 3, 4), (1, 4, 1, 1)),
        ((2, 4, 1), (4,)),
        ((4, 4, 4), (4,)),
        ((4, 4), (1, 1, 4)),
        ((4, 4), (4, 4)),
        ((4, 4), ()),
    ],
)
@pytest.mark.parametrize("kind", ["weight", "variable", "reshaped", "constant", "array"])
def test_weights_are_added_as_in_plain_keras(one, other, kind):
    """Whose rule is not that of NumPy, but the same for every number of rows."""
    add_rows_to_rows()
    random = np.random.default_rng(0)
    rows, values = (random.normal(size=shape).astype(np.float32) for shape in (one, other))
    kinds = {"array": lambda value: value, "variable": tf.Variable, "constant": tf.constant}
    weight = kinds.get(kind, lambda value: keras.Variable(value))(values)

    def added_by(add, known):
        spec = tf.TensorSpec(one if known else [None, *one[1:]])
        given = lambda: keras.ops.reshape(weight, other) if kind == "reshaped" else weight  # noqa: E731 - while traced
        return tf.function(lambda x: add(x, given()), autograph=False, input_signature=[spec])(rows)

    wanted = added_by(backend.numpy.add.of_keras, known=False)
    for found in (added_by(keras.ops.add, known) for known in (True, False)):
        np.testing.assert_array_equal(found, wanted)
    if kind in ("weight", "variable", "array"):  # an eager tensor may be rows or a weight
        np.testing.assert_array_equal(keras.ops.add(tf.constant(rows), weight), wanted)


def test_a_bias_is_still_added_as_one():
    """TensorFlow joins this operation with a product or a convolution before it."""
    add_rows_to_rows()
    for shape, bias in (((5, 4), (4,)), ((5, 3, 3, 4), (1, 1, 1, 4)), ((5, 4, 3, 3), (1, 4, 1, 1))):
        traced = tf.function(keras.ops.add).get_concrete_function(tf.TensorSpec(shape), tf.TensorSpec(bias))
        assert "BiasAdd" in {operation.type for operation in traced.graph.get_operations()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "int8"])
def test_a_number_takes_the_type_of_the_rows(dtype):
    add_rows_to_rows()
    number = 1 if dtype == "int8" else 0.1
    for known in (4, None):
        added = tf.function(lambda x: (keras.ops.add(number, x), keras.ops.add(x, number)), autograph=False)
        graph = added.get_concrete_function(tf.TensorSpec([known, 1], dtype))
        for found in graph(tf.zeros([4, 1], dtype)):
            assert found.dtype == dtype and np.all(found == tf.constant(number, dtype))


def test_tensors_of_unknown_rank():
    add_rows_to_rows()
    added = tf.function(lambda x: keras.ops.add(x, 1.0), input_signature=[tf.TensorSpec(None)])
    np.testing.assert_array_equal(added(tf.ones([2, 2])), 2 * np.ones([2, 2]))


def test_a_model_computes_the_same_for_any_number_of_rows():
    add_rows_to_rows()
    x = keras.Input((4,))
    model = keras.Model(x, x + x[:, :1])
    rows = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    wanted = rows + rows[:, :1]
    for count in (3, 4, 8):
        np.testing.assert_array_equal(model(rows[:count]), wanted[:count])
