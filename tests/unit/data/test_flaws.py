"""Which samples hold NaN, infinite values or labels that are no classes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tfdist.data import flaws, order
from tfdist.data.batch_plan import BatchPlan
from tfdist.data.reading import Reading
from tfdist.data.sources.split import array_split

X = np.zeros([50, 2, 3], np.float32)


def split(x=X, y=None, **changes):
    return dataclasses.replace(array_split("mine:data/train", (x, np.arange(50) % 4 if y is None else y)), **changes)


def with_value(at, value, array=X):
    array = np.array(array)
    array[at] = value
    return array


def trained(found, first=0, count=50, **more):
    return flaws.find_trained(found, BatchPlan(10, 1, 1), Reading(0, True, cut=1), first=first, count=count, **more)


@pytest.mark.parametrize(
    ("value", "words"), [(np.nan, "NaN"), (np.inf, "an infinite value"), (-np.inf, "an infinite value")]
)
def test_a_value_is_named_with_its_place(value, words):
    sentence = f"Sample 37 of mine:data/train has {words} in x at [1, 2]."
    assert (
        trained(split(with_value((37, 1, 2), value)))
        == flaws.find_evaluated(split(with_value((37, 1, 2), value)))
        == sentence
    )
    assert (
        trained(split())
        == flaws.find_evaluated(split())
        == flaws.find_evaluated(split(with_value((37, 1, 2), value)), limit=37)
        == ""
    )


def test_only_what_was_trained_on():
    at = order.sample_of(tf.range(50, dtype=tf.int64), 50, 0, True).numpy().tolist().index(37)
    flawed = split(with_value(37, np.nan))
    assert trained(flawed, at, 1) and not trained(flawed, 0, at) and not trained(flawed, at + 1, 49 - at)


def test_labels_and_parts():
    labels = with_value([3, 4, 8, 9], [-1, 4, 5, -7], np.arange(50) % 4)
    assert flaws.find_evaluated(split(y=labels), choices={"y": flaws.classes(4)}) == " ".join(
        f"Sample {number} of mine:data/train has {label} in y, which is not a class of 0 to 3."
        for number, label in ((3, -1), (4, 4), (8, 5))
    )
    assert flaws.find_evaluated(split(y=labels)) == ""
    nested = array_split(
        "mine:data/train",
        ({"a": X, "b": with_value((5, 0, 1), np.nan)}, np.zeros(50), with_value(6, np.inf, np.ones(50))),
    )
    assert (
        flaws.find_evaluated(nested)
        == "Sample 5 of mine:data/train has NaN in x['b'] at [0, 1]. Sample 6 of mine:data/train has an infinite value"
        " in w."
    )


def test_rows_of_a_table():
    tokens = np.arange(100).reshape(50, 2) % 7
    tokens[3, 1], tokens[5, 0], tokens[9, 0] = 7, -7, -8
    assert flaws.find_evaluated(split(x={"ids": tokens, "other": tokens}), choices={"x['ids']": flaws.rows(7)}) == (
        "Sample 3 of mine:data/train has 7 in x['ids'] at [1], where its table has the rows 0 to 6."
        " Sample 9 of mine:data/train has -8 in x['ids'] at [0], where its table has the rows 0 to 6."
    )


def test_streams_tell_the_position():
    data = tf.data.Dataset.from_tensor_slices((with_value(37, np.nan), np.arange(50)))
    stream = split(size=None, fetch=None, stream=lambda shard, shards: data.shard(shards, shard))
    assert flaws.find_evaluated(stream) == "The sample at position 37 of mine:data/train has NaN in x at [0, 0]."
    plan = BatchPlan(10, 1, 1)
    assert (
        flaws.find_trained(stream, plan, Reading(0, False, cut=1), first=30, count=20)
        == "The sample at position 37 of mine:data/train has NaN in x at [0, 0]."
    )
    assert flaws.find_trained(stream, plan, Reading(0, False, cut=1), first=0, count=30) == ""
