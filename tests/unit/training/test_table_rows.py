"""Rows of tables that are subtracted by XLA, against NumPy's `subtract.at`."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.marks import slow_but
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import DataError
from tfdist.runtime.errors import explain
from tfdist.training.table_rows import filled_up, subtracting_rows

# The length of the slices decides how many are added at a time, and the shape of a row how they are stored.
LENGTHS = {(11,): [0, 1, 9], (11, 3): [0, 1, 7, 8, 9, 16, 17, 31, 100, 257], (11, 2, 3): [0, 8, 31]}
UNKNOWN = "a length that is not known"


@pytest.mark.parametrize("shape", LENGTHS, ids=str)
@pytest.mark.parametrize("how", slow_but(["eagerly", "a length that is known", UNKNOWN], UNKNOWN))
def test_as_numpy(shape, how):
    """In the order of the slices, to the bit; a first row that is not finite stays what it was."""
    start = np.random.default_rng(0).normal(size=shape).astype("float32")
    start[0] = np.inf
    table, expected = tf.Variable(start), start.copy()
    assign_sub = subtracting_rows(keras.optimizers.SGD(0.1))
    for length in LENGTHS[shape]:
        random = np.random.default_rng(length)
        rows = random.integers(1, 11, length).astype("int64")
        values = random.normal(size=(length, *shape[1:])).astype("float32")

        def update(values, rows):
            assign_sub(table, tf.IndexedSlices(values, rows))

        dim = None if how == UNKNOWN else length
        signature = [tf.TensorSpec([dim, *shape[1:]]), tf.TensorSpec([dim], tf.int64)]
        update = update if how == "eagerly" else tf.function(update, input_signature=signature, autograph=False)
        update(tf.constant(values), tf.constant(rows))
        np.subtract.at(expected, rows, values)
        np.testing.assert_array_equal(table, expected)


@pytest.mark.parametrize("wrong", [-1, 11])
@pytest.mark.parametrize("eager", [True, False])
def test_a_row_that_is_not_there(wrong, eager):
    table, assign_sub = tf.Variable(tf.zeros([11, 2])), subtracting_rows(keras.optimizers.SGD(0.1))

    def update():
        assign_sub(table, tf.IndexedSlices(tf.ones([3, 2]), tf.constant([0, wrong, 10])))

    with pytest.raises(tf.errors.InvalidArgumentError) as found:
        (update if eager else tf.function(update, autograph=False))()
    error = explain(found.value, Cluster())
    assert isinstance(error, DataError) and re.search(r"\(rows of table \S+ are not in \[0, 11\)\): fix", str(error))
    assert not table.numpy().any()


def test_xla_compiles_for_few_lengths():
    """Else each batch of another length would take a new program, and memory for it."""
    lengths = set()
    for length in range(1, 513):
        values, rows = filled_up(tf.ones([length, 2]), tf.ones([length], tf.int64), rank=2)
        lengths.add(len(rows))
        assert len(values) == len(rows) and length <= len(rows) <= length + length // 8
        assert float(tf.reduce_sum(values)) == 2 * length
    assert len(lengths) <= 8 * 7
