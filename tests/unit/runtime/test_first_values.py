"""Variables that begin with the chief's values: together, at the end of the block, in messages of a bounded size."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist.runtime import first_values
from tfdist.runtime.first_values import chiefs_first_values


def test_all_have_the_chiefs_values_afterwards():
    told = []

    def broadcast(mine):
        told.append([array.tolist() for array in mine])
        return [array + np.ones_like(array) for array in mine]

    with chiefs_first_values(broadcast):
        first = tf.Variable([1.0, 2.0])
        second = tf.Variable(3, dtype=tf.int64)
        third = tf.Variable(tf.cast(first, tf.bfloat16))
        assert told == [] and first.numpy().tolist() == [1.0, 2.0]
    assert told == [[[1.0, 2.0], 3, [1.0, 2.0]]]
    assert first.numpy().tolist() == [2.0, 3.0] and second.numpy() == 4
    assert third.numpy().tolist() == [2.0, 3.0] and third.dtype == tf.bfloat16


def test_large_ones_travel_by_themselves(monkeypatch):
    monkeypatch.setattr(first_values, "_BYTES_AT_ONCE", 100)
    told = []
    with chiefs_first_values(lambda mine: told.append([array.size for array in mine]) or mine):
        _ = [tf.Variable(tf.zeros([size])) for size in (10, 20, 1000, 1, 2)]
    assert told == [[10, 20], [1000], [1, 2]]


def test_what_goes_wrong_inside_sends_nothing():
    told = []
    with pytest.raises(ValueError, match="inside"), chiefs_first_values(told.append):
        tf.Variable(1.0)
        raise ValueError("inside")
    assert told == []
