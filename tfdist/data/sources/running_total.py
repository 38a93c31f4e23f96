"""Checks a total over all records of a stream, while these are read: of a stream, nothing is known before its end."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfdist.data.reading import as_is


def with_checked_total(
    records: tf.data.Dataset,
    amount: Callable[[tf.Tensor], tf.Tensor],
    is_right: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    refuse: Callable,
    batch: int,
    *about: tf.Tensor,
) -> tf.data.Dataset:
    """Returns the same records (strings), which are read and counted `batch` at a time.

    amount: of the records in a batch (string [n] -> int64 []). is_right: (total so far, whether this is the end) ->
    bool []. refuse: a Python function that raises, called with (total, *about) where the total is not right.
    """

    def check(before: tf.Tensor, found: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        total = before + amount(found)

        def refused() -> tf.Tensor:
            # stateful=False: otherwise op determinism forbids parallel reads.
            return tf.numpy_function(refuse, [total, *about], tf.string, stateful=False)

        checked = tf.cond(is_right(total, tf.equal(tf.size(found), 0)), lambda: found, refused)
        return total, tf.ensure_shape(checked, [None])

    the_end = tf.data.Dataset.from_tensors(tf.zeros([0], tf.string))
    return records.batch(batch).concatenate(the_end).scan(tf.constant(0, tf.int64), as_is(check)).unbatch()
