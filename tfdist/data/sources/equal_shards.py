"""Shards of a stream that must hold equally many records. Each replica repeats its own shard: without this check, the
samples of a shorter shard would come more often, unnoticed."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfdist.control.exit_codes import DataError
from tfdist.data.sources.running_total import with_checked_total

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

    def is_right(count: tf.Tensor, is_end: tf.Tensor) -> tf.Tensor:
        return tf.where(is_end, tf.equal(count, length), count <= length)

    return with_checked_total(records, lambda batch: tf.size(batch, tf.int64), is_right, refuse, _BATCH)
