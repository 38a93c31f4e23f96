"""A number for each row, added to as many channels as there are rows."""

import itertools

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
    ((1, 4, 4), (1, 4, 1)),
    ((1, 2, 4, 4), (1, 1, 4, 1)),
    ((1, 4, 3, 4), (1, 4, 1, 1)),
    ((1, 1, 4), (1, 4, 1)),
]


@pytest.mark.parametrize("one, other", SHAPES)
def test_numbers_of_rows_are_added_to_their_rows(one, other):
    add_rows_to_rows()
    random = np.random.default_rng(0)
    a, b = (random.normal(size=shape).astype(np.float32) for shape in (one, other))
    np.testing.assert_array_equal(keras.ops.add(a, b), a + b)
    np.testing.assert_array_equal(tf.function(keras.ops.add)(tf.constant(a), tf.constant(b)), a + b)
    np.testing.assert_array_equal(keras.layers.Add()([a, b]) if other == one else keras.ops.add(b, a), a + b)


def test_sums_are_those_of_numpy():
    add_rows_to_rows()
    shapes = [shape for rank in range(4) for shape in itertools.product((1, 2, 3), repeat=rank)]
    arrays = [np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape) for shape in shapes]
    wrong = []
    for one, other in itertools.product(arrays, repeat=2):
        try:
            wanted = one + 10 * other
        except ValueError:
            continue  # no such sum
        found = keras.ops.convert_to_numpy(keras.ops.add(one, 10 * other))
        if found.shape != wanted.shape or (found != wanted).any():
            wrong.append((one.shape, other.shape))
    assert not wrong


def test_a_bias_is_still_added_as_one():
    """TensorFlow joins this operation with a product or a convolution before it."""
    add_rows_to_rows()
    for shape, bias in (((5, 4), (4,)), ((5, 3, 3, 4), (1, 1, 1, 4)), ((5, 4, 3, 3), (1, 4, 1, 1))):
        traced = tf.function(keras.ops.add).get_concrete_function(tf.TensorSpec(shape), tf.TensorSpec(bias))
        assert "BiasAdd" in {operation.type for operation in traced.graph.get_operations()}


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
