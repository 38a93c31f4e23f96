"""Variables that begin with the chief's values: together, at the end of the block, in messages of a bounded size."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tfdist.control.exit_codes import ConfigError
from tfdist.runtime import first_values
from tfdist.runtime.first_values import chiefs_first_values


def other_values(own):
    """Counts and shapes are alike, no checksum is."""
    return own + own.ndim - 1


def workers(broadcast, others=other_values, rank=1):
    """Of two. others: what the other has in place of this one's."""
    return SimpleNamespace(size=2, rank=rank, broadcast=broadcast, all_gather=lambda own: np.stack([own, others(own)]))


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


def test_those_that_differed_are_named(monkeypatch):
    monkeypatch.setattr(first_values, "must_be_alike", lambda *_: None)
    variables = [tf.Variable(tf.ones([2])), tf.Variable(1.0), tf.Variable(tf.zeros([3]))]

    def others(own):
        return own + np.array([[0, 0], [0, 1], [1, 0]])

    assert first_values.take_the_chiefs(workers(lambda mine: mine, others), variables) == [1, 2]
    assert first_values.take_the_chiefs(workers(lambda mine: mine, lambda own: own), variables) == []


def test_strings_must_be_the_same():
    with chiefs_first_values(workers(lambda mine: mine, others=lambda own: own)):
        tf.Variable(["a", "b"])
    with pytest.raises(ConfigError, match="different strings in"), chiefs_first_values(workers(lambda mine: mine)):
        tf.Variable(["a", "b"])


def test_those_of_no_fixed_shape_must_be_the_same():
    def create():
        return tf.Variable([[1.0, 2.0]], shape=tf.TensorShape(None))

    with chiefs_first_values(workers(lambda mine: mine, others=lambda own: own)):
        create()
    with pytest.raises(ConfigError, match="no fixed shape in"), chiefs_first_values(workers(lambda mine: mine)):
        create()


def test_large_ones_travel_by_themselves(monkeypatch):
    monkeypatch.setattr(first_values, "_BYTES_AT_ONCE", 100)
    told = []
    with chiefs_first_values(workers(lambda mine: told.append([array.size for array in mine]) or mine)):
        _ = [tf.Variable(tf.zeros([size])) for size in (10, 20, 1000, 1, 2)]
    assert told == [[10, 20], [1000], [1, 2]]


def test_what_is_the_same_everywhere_stays_where_it_is():
    """Of one variable the second worker has one other bit."""
    told, variables = [], [np.float32([1, 2]), np.float32([3]), np.float32([])]

    def others(own):
        if own.ndim == 1:
            return own
        theirs = [
            tf.Variable(value) for value in (variables[0], np.nextafter(variables[1], np.float32(4)), variables[2])
        ]
        return np.array([first_values._checksums(each) for each in theirs])

    for rank in (0, 1):
        with chiefs_first_values(workers(lambda mine: told.append(mine) or [np.float32([7])], others, rank)):
            mine = [tf.Variable(value) for value in variables]
        assert [each.numpy().tolist() for each in mine] == [[1.0, 2.0], [7.0 if rank else 3.0], []]
    assert [[array.tolist() for array in arrays] for arrays in told] == [[[3.0]], [[3.0]]]


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
