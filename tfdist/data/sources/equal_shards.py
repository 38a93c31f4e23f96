"""Shards of a stream that must hold equally many records. Each replica repeats its own shard: without this check, the
samples of a shorter shard would come more often, unnoticed."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfdist.control.exit_codes import DataError
from tfdist.data.reading import as_is

_BATCH = 64  # records that are counted at once


def counted(records: tf.data.Dataset, length: int) -> tf.data.Dataset:
    """Returns one pass of a shard, `records` (strings). Reading past its last record raises DataError if it has fewer
    than `length` records; so does reading a record beyond `length`."""

    def refuse(count: np.ndarray) -> np.ndarray:
        raise DataError(
            "--source_args: by_file=True is for files with the same number of records. Judging by the first file, each"
            f" worker should read {length:,} of them, but one reads"
            f" {'only ' if count < length else ''}{count:,}{'' if count < length else ' or more'}: drop by_file=True,"
            " or rewrite the files."
        )

    def count(before: tf.Tensor, batch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        size = tf.shape(batch, tf.int64)[0]
        after = before + size
        right = tf.where(size > 0, after <= length, tf.equal(after, length))
        batch = tf.cond(right, lambda: batch, lambda: tf.numpy_function(refuse, [after], tf.string, stateful=False))
        return after, tf.ensure_shape(batch, [None])

    the_end = tf.data.Dataset.from_tensors(tf.zeros([0], tf.string))
    batches = records.batch(_BATCH).concatenate(the_end)
    return batches.scan(tf.constant(0, tf.int64), as_is(count)).unbatch()
