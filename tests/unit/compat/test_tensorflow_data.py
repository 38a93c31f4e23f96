"""What is known of the order of a tf.data.Dataset from the operations that it is made of."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfdist.compat import tensorflow_data


def rows(count=8):
    return tf.data.Dataset.from_tensor_slices(tf.range(count))


def mapped(**how):
    return rows().map(lambda x: x + 1, num_parallel_calls=2, **how)


def interleaved(inner, **how):
    return rows(2).interleave(inner, num_parallel_calls=2, **how)


def in_any_order(dataset):
    return any(map(tensorflow_data.in_any_order, tensorflow_data.with_inputs(dataset)))


def inside_of_two(dataset):
    return rows(2).flat_map(lambda _: rows(2).interleave(lambda _: dataset()))


MADE = {
    "map": mapped,
    "map before others": lambda **how: mapped(**how).filter(lambda x: x > 2).prefetch(1),
    "batch": lambda **how: rows().batch(2, num_parallel_calls=2, **how),
    "interleave": lambda **how: interleaved(lambda _: rows(), **how),
    "interleave before others": lambda **how: tf.data.Dataset.zip(rows(), interleaved(lambda _: rows(), **how)),
    "map in functions": lambda **how: inside_of_two(lambda: mapped(**how)),
    "interleave in functions": lambda **how: inside_of_two(lambda: interleaved(lambda _: rows(), **how)),
}


@pytest.mark.parametrize("name", MADE)
def test_an_operation_that_yields_what_is_ready_first_is_found(name):
    assert in_any_order(MADE[name](deterministic=False))
    assert not in_any_order(MADE[name](deterministic=True)) and not in_any_order(MADE[name]())


def test_options_may_be_overridden():
    """By those of the pipeline that reads the dataset: only the operation's own argument counts."""
    options = tf.data.Options()
    options.deterministic = False
    assert not in_any_order(interleaved(lambda _: rows()).with_options(options))


def test_python_functions_and_tables_do_not_hide_it():
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2]), 0)
    generated = tf.data.Dataset.from_generator(lambda: iter([1, 2]), output_signature=tf.TensorSpec([], tf.int32))
    for deterministic in (False, True):
        found = generated.interleave(
            lambda x: rows().map(lambda y: table.lookup(x + y)), num_parallel_calls=2, deterministic=deterministic
        )
        assert in_any_order(found) is not deterministic


def over_tensors(**how):
    held = tf.data.Dataset.from_tensor_slices(tf.zeros([1000], tf.float64))
    return held.interleave(lambda _: rows(), num_parallel_calls=2, **how)


def of_tensors(**how):
    held = tf.zeros([1000], tf.float64)
    return interleaved(lambda at: tf.data.Dataset.from_tensors(held[at]), **how)


def of_a_dataset(**how):
    held = rows()
    return interleaved(lambda at: held.skip(tf.cast(at, tf.int64)), **how)


@pytest.mark.parametrize("make", [over_tensors, of_tensors, of_a_dataset])
def test_an_interleave_of_much_in_memory_is_not_copied(make, monkeypatch):
    """To look at a smaller one, what it reads from is copied."""
    copied, copy = [], tensorflow_data._as_graph
    monkeypatch.setattr(tensorflow_data, "_as_graph", lambda dataset: copied.append(dataset) or copy(dataset))
    for most in (8008, 7999):
        monkeypatch.setattr(tensorflow_data, "_MOST_BYTES", most)
        for deterministic in (False, True, None):
            assert in_any_order(make(deterministic=deterministic)) is (deterministic is False)
    assert len(copied) == (0 if make is of_a_dataset else 3)


@pytest.mark.parametrize("most", [2**20, 0])
def test_a_look_draws_no_order(most, monkeypatch):
    """A fit reads the dataset afterwards."""
    monkeypatch.setattr(tensorflow_data, "_MOST_BYTES", most)

    def shuffled():
        order = rows().shuffle(8, seed=1)
        return order, order.interleave(tf.data.Dataset.from_tensors, num_parallel_calls=2, deterministic=False)

    (looked_at, read), (other, _) = shuffled(), shuffled()
    assert in_any_order(read) is bool(most)
    assert list(looked_at.as_numpy_iterator()) == list(other.as_numpy_iterator())
