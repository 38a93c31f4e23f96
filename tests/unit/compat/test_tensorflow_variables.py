"""Variables that are read where they are."""

import numpy as np
import tensorflow as tf

from tfdist.compat.tensorflow_variables import read_in_place


def where(tensor: tf.Tensor) -> int:
    return np.frombuffer(memoryview(tensor), np.float32).ctypes.data


def test_a_table_of_which_rows_have_changed_is_read_without_a_copy():
    table = tf.Variable(np.arange(40, dtype=np.float32).reshape(10, 4))
    expected = table.numpy()
    for row in (3, 7):
        table.scatter_update(tf.IndexedSlices(tf.constant([[1.0, 2.0, 3.0, 4.0]]), tf.constant([row])))
        expected[row] = [1, 2, 3, 4]
        copied = table.read_value()
        read, again = read_in_place(table), read_in_place(table)
        assert where(read) == where(again) != where(copied)
        np.testing.assert_array_equal(read, expected)
    # Whoever keeps what was read keeps it as it was.
    table.scatter_update(tf.IndexedSlices(tf.constant([[0.0] * 4]), tf.constant([0])))
    np.testing.assert_array_equal(read, expected)
    expected[0] = 0
    np.testing.assert_array_equal(read_in_place(table), expected)


def test_variables_of_a_strategy_are_read_as_well():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0])
    np.testing.assert_array_equal(read_in_place(variable), [1, 2])
    np.testing.assert_array_equal(strategy.run(lambda: read_in_place(variable) + 1), [2, 3])
