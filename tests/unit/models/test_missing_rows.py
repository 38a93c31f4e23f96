"""Rows that a table does not have: NaN where XLA would look up another one, and bit for bit Keras' rows elsewhere."""

import functools
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.marks import slow_but
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


TABLE = np.random.default_rng(0).normal(size=(10, 6, 4)).astype(np.float32)
NUMBERS = np.arange(10, dtype=np.int32)[::-1].copy()  # where each row is to be looked up
# name -> (what is computed of numbers [2, 3], 0 to 9 are in range; how it ends outside of its range)
LOOKUPS = {
    "gather": lambda n: tf.gather(TABLE, n),
    "gather of a variable": lambda n: tf.gather(held(), n),
    "gather on another axis": lambda n: tf.gather(TABLE.transpose(1, 2, 0), n, axis=2),
    "gather in each row": lambda n: tf.gather(
        TABLE[:2].transpose(0, 2, 1)[..., :1].repeat(10, -1), n, axis=2, batch_dims=1
    ),
    "gather in each row, the last axis": lambda n: tf.gather(TABLE[:2, :, 0].repeat(2, -1)[:, :10], n, batch_dims=-1),
    "gather of complex numbers": lambda n: tf.math.real(tf.gather(tf.complex(TABLE, TABLE), n)),
    "gather of half precision": lambda n: tf.cast(tf.gather(tf.cast(TABLE, tf.bfloat16), n), tf.float32),
    "take of Keras": lambda n: keras.ops.take(TABLE, n, axis=0),
    "take_along_axis of Keras": lambda n: keras.ops.take_along_axis(TABLE[:2].repeat(2, 1)[:, :10, 0], n, axis=1),
    "embedding_lookup": lambda n: tf.nn.embedding_lookup(held(), n),
    "gather_nd": lambda n: tf.gather_nd(TABLE, tf.stack([n, n % 6], -1)),
    "whole numbers": lambda n: tf.cast(tf.gather(NUMBERS, n), tf.float32),
    "whole numbers, by gather_nd": lambda n: tf.cast(tf.gather_nd(NUMBERS.astype(np.int64), n[..., None]), tf.float32),
    "bools": lambda n: tf.cast(tf.gather(NUMBERS > 5, n), tf.float32),
    "a row by way of whole numbers": lambda n: tf.gather(TABLE, tf.gather(NUMBERS, n)),
    "raw_ops": lambda n: tf.raw_ops.GatherV2(params=TABLE, indices=n, axis=0),
    "imaginary parts": lambda n: tf.math.imag(tf.gather(tf.complex(TABLE, TABLE), n)),
    "what has no NaN": lambda n: tf.cast(tf.argmax(tf.gather(TABLE, n), -1), tf.float32),
    "scatter_nd into a shape of data": lambda n: tf.scatter_nd(n[..., None], tf.ones([2, 3]), [8 + tf.shape(n)[0]]),
    "scatter_nd": lambda n: tf.scatter_nd(n[..., None], tf.ones([2, 3]), [10]),
    "scatter of Keras": lambda n: keras.ops.scatter(tf.reshape(n, [-1, 1]), tf.ones([6]), (10,)),
    "tensor_scatter_nd_update": lambda n: tf.tensor_scatter_nd_update(TABLE, n[1:, 1:2], TABLE[:1]),
    "unsorted_segment_sum": lambda n: tf.math.unsorted_segment_sum(TABLE[:6, 0], tf.reshape(n, [-1]), 10),
    "segment_max of Keras": lambda n: keras.ops.segment_max(TABLE[:6, 0], tf.reshape(n, [-1]), 10),
}
INSIDE = {
    "the model": lambda f, n: f(n),
    "a function": lambda f, n: tf.function(f, autograph=False)(n),
    "cond": lambda f, n: tf.cond(tf.reduce_sum(n) > -1000, lambda: f(n), lambda: f(n - n)),
    "map_fn": lambda f, n: tf.map_fn(lambda _: f(n), tf.zeros([2]), fn_output_signature=tf.float32),
    "recompute_grad": lambda f, n: tf.recompute_grad(f)(n),
}
NOT_TOLD_THERE = {
    "bools",
    "whole numbers",
    "whole numbers, by gather_nd",
    "what has no NaN",
}
NOT_TOLD_IN = INSIDE.keys() - {"the model", "recompute_grad"}  # from where their tensors do not come out


@functools.cache
def held():
    return tf.Variable(TABLE)


def computing(lookup):
    """A function of numbers, compiled once for all of them: what is looked up in each place, and what XLA's own is."""

    def found(inside, wanted, numbers):
        with missing_rows.as_nan(wanted):
            return missing_rows.poisoned(INSIDE[inside](LOOKUPS[lookup], numbers))

    @tf.function(jit_compile=True, autograph=False, input_signature=[tf.TensorSpec([2, 3], tf.int32)])
    def step(numbers):
        return {inside: found(inside, True, numbers) for inside in INSIDE}, found("the model", False, numbers)

    return step


@pytest.mark.parametrize("lookup", slow_but(LOOKUPS, "gather of a variable", "scatter of Keras"))
def test_whatever_looks_up(lookup):
    compute = computing(lookup)
    for number in (10, 1000):
        missing = tf.constant([[0, 9, 3], [5, number, 2]])
        with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
            LOOKUPS[lookup](missing)  # TensorFlow's own
        ours, theirs = compute(missing)
        assert np.isfinite(theirs).all()  # else this needs nothing of ours
        for inside, found in ours.items():
            is_told = np.isnan(found).any()
            assert is_told or inside in NOT_TOLD_IN and lookup in NOT_TOLD_THERE, (inside, found)
    ours, theirs = compute(tf.constant([[0, 9, 3], [5, 2, 2]]))
    for inside, found in ours.items():
        np.testing.assert_array_equal(found, np.broadcast_to(theirs, found.shape), err_msg=inside)


def test_gradients_of_what_is_sorted():
    """They put rows in places, of a shape that is a list with tensors in it."""

    @tf.function(jit_compile=True, autograph=False)
    def gradient(x, wanted):
        with missing_rows.as_nan(wanted), tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.math.top_k(x, 2).values * keras.ops.sort(x)[:, :2])
        return tape.gradient(y, x)

    x = tf.constant(np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32))
    np.testing.assert_array_equal(gradient(x, True), gradient(x, False))


def test_the_gradient_is_nan_too_where_a_maximum_passes_over_it():
    @tf.function(jit_compile=True, autograph=False)
    def gradient(numbers):
        weight = tf.ones([4])
        with missing_rows.as_nan(True), tf.GradientTape() as tape:
            tape.watch(weight)
            y = missing_rows.poisoned(tf.reduce_sum(weight * tf.reduce_max(tf.gather(TABLE[:, 0], numbers), [0, 1])))
        return y, tape.gradient(y, weight)

    assert not any(np.isfinite(each).any() for each in gradient(tf.constant([[0, 12]])))
    assert all(np.isfinite(each).all() for each in gradient(tf.constant([[0, 2]])))


@pytest.mark.parametrize("wanted", [True, False])
def test_a_crossentropy_sees_the_logits_of_what_may_become_nan(wanted):
    @tf.function(jit_compile=True, autograph=False)
    def step(numbers):
        with missing_rows.as_nan(wanted):
            logits = tf.gather(tf.constant([[30.0], [-40.0]]), numbers)
            return keras.losses.binary_crossentropy([[0.0], [1.0]], missing_rows.poisoned(tf.sigmoid(logits)))

    np.testing.assert_allclose(step(tf.constant([0, 1])), [30, 40])
    assert np.isnan(step(tf.constant([0, 2]))).all() == wanted  # without, XLA takes the last row


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
