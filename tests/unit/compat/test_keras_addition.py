"""A number for each row, added to as many channels as there are rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf

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
]


@pytest.mark.parametrize("one, other", SHAPES)
def test_numbers_of_rows_are_added_to_their_rows(one, other):
    add_rows_to_rows()
    random = np.random.default_rng(0)
    a, b = (random.normal(size=shape).astype(np.float32) for shape in (one, other))
    np.testing.assert_array_equal(keras.ops.add(a, b), a + b)
    np.testing.assert_array_equal(tf.function(keras.ops.add)(tf.constant(a), tf.constant(b)), a + b)
    np.testing.assert_array_equal(keras.layers.Add()([a, b]) if other == one else keras.ops.add(b, a), a + b)


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
