"""A weight below 0 is refused where samples are read, with the sample and the weight."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import DataError
from tfdist.data.batch_plan import BatchPlan
from tfdist.data.input_pipeline import eval_dataset, train_dataset
from tfdist.data.reading import Reading
from tfdist.data.sources.objects import object_split
from tfdist.data.sources.split import Split, array_split
from tfdist.runtime.errors import explain


def weights(shape, at):
    w = np.ones(shape, np.float32)
    w[at] = -2.5
    return w


class Items:
    def __init__(self, w):
        self.w = w

    def __len__(self):
        return len(self.w)

    def __getitem__(self, index):
        return np.float32(index), np.int32(index), self.w[index]


def of_items(w):
    return object_split("mine/train", Items(w))


def of_stream(w):
    data = tf.data.Dataset.from_tensor_slices((np.arange(float(len(w))), np.arange(len(w)), w))
    return Split("mine/train", None, data.element_spec, stream=lambda shard, shards: data.shard(shards, shard))


def read(split, evaluated):
    if evaluated:
        return list(eval_dataset(split, batch=4, replica=0, replicas=1)[0])
    return list(
        train_dataset(split, Reading(seed=0, shuffle=False), plan=BatchPlan(4, 1, 1), replica=0, consumed=0).take(4)
    )


@pytest.mark.parametrize("make", [of_items, of_stream])
@pytest.mark.parametrize(("shape", "at"), [((9,), 6), ((9, 3), (6, 2))])
@pytest.mark.parametrize("evaluated", [True, False])
def test_what_is_read_later(make, shape, at, evaluated):
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        read(make(weights(shape, at)), evaluated)
    found = explain(error.value, Cluster())
    assert isinstance(found, DataError) and "sample 6 of mine/train has the weight -2.5" in str(found), found
    read(make(np.zeros(shape, np.float32)), evaluated)  # 0 is none, and neither is NaN
    read(make(np.full(shape, np.nan, np.float32)), evaluated)


@pytest.mark.parametrize(("shape", "at"), [((9,), 6), ((9, 3), (6, 2))])
def test_arrays_are_looked_at_before_training(shape, at):
    with pytest.raises(DataError, match=r"sample 6 of mine/train has the weight -2\.5, .* in y, .* --objective"):
        array_split("mine/train", (np.arange(9.0), np.arange(9), weights(shape, at)))


def test_samples_of_unknown_shape():
    """As a `fetch` of the user's own in Python gives them."""
    split = of_items(weights((9,), 6))

    def fetch(indices):
        *parts, w = tf.numpy_function(
            lambda at: (at, at, weights((9,), 6)[at]), [indices], [tf.int64, tf.int64, tf.float32]
        )
        return *parts, w

    spec = (tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.float32))
    with pytest.raises(tf.errors.InvalidArgumentError, match="a negative weight"):
        read(dataclasses.replace(split, fetch=fetch, element_spec=spec), False)
