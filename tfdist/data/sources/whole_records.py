"""The records of a TFRecord file to its very end.

TensorFlow's reader takes fewer than the 12 bytes of a record's header for the end of the file: one that was cut short
there would only have fewer records (TensorFlow 2.21, record_reader.cc). So the bytes that were read are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfdist.compat.tensorflow_checksums import FRAME_BYTES
from tfdist.control.exit_codes import DataError
from tfdist.data.sources.running_total import with_checked_total

_BATCH = 16  # records that are counted at once: one by one, reading takes four times as long


def whole_records(
    sizes: Sequence[int], name_of: Callable[[int], str]
) -> Callable[[tf.Tensor, tf.Tensor], tf.data.Dataset]:
    """Returns a function: (number of an uncompressed file, its path) -> its records, read by TensorFlow.

    sizes: of the files, in bytes. name_of: returns the path of a file as messages show it. Reading past the last record
    of a file that was cut short raises DataError.
    """
    ends = tf.constant(sizes, tf.int64)

    def refuse(at: np.ndarray, number: np.ndarray) -> np.ndarray:
        raise DataError(
            f"{name_of(int(number))} has {sizes[int(number)]:,} bytes, but its records end at byte {at:,}: it was"
            " truncated within a record, write it again; or it was changed since the run began, restore it."
        )

    def bytes_of(batch: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.cast(tf.strings.length(batch), tf.int64) + FRAME_BYTES)

    def records(number: tf.Tensor, path: tf.Tensor) -> tf.data.Dataset:
        return with_checked_total(
            tf.data.TFRecordDataset(path),
            bytes_of,
            lambda total, is_end: tf.logical_or(tf.logical_not(is_end), tf.equal(total, ends[number])),
            refuse,
            _BATCH,
            number,
        )

    return records
