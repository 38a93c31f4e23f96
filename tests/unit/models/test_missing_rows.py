"""Rows that a table does not have: NaN where XLA would look up another one, and bit for bit Keras' rows elsewhere."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfdist.models import missing_rows
from tfdist.models.embedding_rows import read_rows

IDS = np.array([[0, 10, -10], [9, -11, -1]], np.int32)


@pytest.fixture(params=["Keras", "by the row"])
def table(request):
    keras.utils.set_random_seed(0)
    layer = layers.Embedding(10, 4)
    layer.build((None, 3))
    if request.param == "by the row":
        read_rows(layer)
    return layer


def looked_up(layer, ids, wanted):
    """(rows, gradient of the table) of XLA."""

    @tf.function(jit_compile=True, autograph=False)
    def step(ids):
        with tf.GradientTape() as tape, missing_rows.as_nan(wanted):
            found = layer(ids)
        return found, tf.convert_to_tensor(tape.gradient(found, layer.embeddings.value))

    return [each.numpy() for each in step(tf.constant(ids))]


def test_xla_looks_up_nan_and_no_other_row(table):
    there = (IDS >= -10) & (IDS < 10)
    found, _ = looked_up(table, IDS, True)
    np.testing.assert_array_equal(np.isnan(found), np.broadcast_to(~there[..., None], found.shape))
    np.testing.assert_array_equal(found[there], table.embeddings.numpy()[IDS[there]])
    assert not np.isnan(looked_up(table, IDS, False)[0]).any()  # else this needs nothing of ours


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_rows_that_are_there_keep_their_bits(dtype):
    layer = layers.Embedding(300, 4)
    layer.build((None, 3))
    for ours, theirs in zip(
        *(looked_up(layer, np.clip(IDS, 0, 9).astype(dtype), wanted) for wanted in (True, False)), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_only_inside_and_in_this_thread(table):
    """Replicas are traced by threads that wait for each other in the middle of their models."""
    inside, done = threading.Event(), threading.Event()

    def other():
        with missing_rows.as_nan(True):
            inside.set()
            done.wait()

    thread = threading.Thread(target=other)
    with pytest.raises(ValueError), missing_rows.as_nan(True):
        thread.start()
        inside.wait()
        raise ValueError
    try:
        assert not np.isnan(looked_up(table, IDS, False)[0]).any()
    finally:
        done.set()
        thread.join()
    assert np.isnan(looked_up(table, IDS, True)[0]).any() and not np.isnan(looked_up(table, IDS, False)[0]).any()
    assert missing_rows.are_silent(jit_compile=True) and not missing_rows.are_silent()


def test_which_inputs_are_looked_up():
    a, b = keras.Input((3,), dtype="int32", name="a"), keras.Input((3,), dtype="int32", name="b")
    rows = layers.Embedding(10, 4)
    several = keras.Model(
        {"a": a, "b": b}, rows(a) + layers.Embedding(7, 4)(a) + rows(layers.Lambda(lambda i: i + 1)(b))
    )
    assert {name: count for name, count in missing_rows.table_sizes(several).items() if "'" in name} == {"x['a']": 7}
    assert missing_rows.table_sizes(keras.Model(b, rows(b)))["x"] == 10
    assert missing_rows.table_sizes(keras.Sequential([layers.Dense(3)])) == {}
