"""A table that is cut by rows: two members in one process."""

import types

import numpy as np
import tensorflow as tf
from keras import layers

from tfdist.training.parallel.tensor import vocabulary

ROWS = 9


def looked_up_by(rank, ids):
    """What member `rank` of two adds to the sum."""
    layer = layers.ReversibleEmbedding(ROWS, 3, tie_weights=True)
    layer.build((None, None))
    table = np.arange(ROWS * 3, dtype=np.float32).reshape(ROWS, 3)
    layer.embeddings.assign(table)
    rule = vocabulary(leave=lambda found, group: found)
    (part,) = rule(layer, types.SimpleNamespace(size=2, index=rank)).values()
    layer.embeddings.assign(part.cut(table))
    return layer(tf.constant(ids)).numpy(), table


def test_rows_come_together_and_what_no_member_has_is_nan():
    ids = np.array([[0, 8, 9], [4, -9, -1], [5, -10, -5]], np.int32)
    (first, table), (second, _) = (looked_up_by(rank, ids) for rank in range(2))
    there = (ids >= -ROWS) & (ids < ROWS)
    np.testing.assert_array_equal((first + second)[there], table[ids[there]])
    assert np.isnan((first + second)[~there]).all()
