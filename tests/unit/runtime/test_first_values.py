"""Variables that begin with the chief's values: together, at the end of the block, in messages of a bounded size."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tfdist.control.exit_codes import ConfigError
from tfdist.runtime import first_values
from tfdist.runtime.first_values import chiefs_first_values


def workers(broadcast, others=lambda own: own):
    """Of two. others: what the second has in place of the first's."""
    return SimpleNamespace(size=2, broadcast=broadcast, all_gather=lambda own: np.stack([own, others(own)]))


def test_all_have_the_chiefs_values_afterwards():
    told = []

    def broadcast(mine):
        told.append([array.tolist() for array in mine])
        return [array + np.ones_like(array) for array in mine]

    with chiefs_first_values(workers(broadcast)):
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
    with chiefs_first_values(workers(lambda mine: told.append([array.size for array in mine]) or mine)):
        _ = [tf.Variable(tf.zeros([size])) for size in (10, 20, 1000, 1, 2)]
    assert told == [[10, 20], [1000], [1, 2]]


def test_what_goes_wrong_inside_sends_nothing():
    told = []
    with pytest.raises(ValueError, match="inside"), chiefs_first_values(workers(told.append)):
        tf.Variable(1.0)
        raise ValueError("inside")
    assert told == []


def test_other_variables_are_refused_before_any_bytes_are_taken_for_theirs():
    """As many bytes of other shapes would be taken without a word."""
    told = []
    with (
        pytest.raises(ConfigError, match="1 and 1 variables.*build the same model"),
        chiefs_first_values(workers(told.append, lambda own: own + np.array([0, 1]))),
    ):
        tf.Variable(tf.zeros([8, 16]))
    assert told == []
