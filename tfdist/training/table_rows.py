"""Updates of single rows of a table, on a CPU: the same bits on every replica, whatever the number of threads.

TensorFlow's own update (`scatter_sub`) applies repeated rows in the order in which its threads run: each replica would
round differently, and the replicas would drift apart. A loop compiled by XLA applies them in the order of the slices,
in a ninth of the time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import keras
import tensorflow as tf

from tfdist.compat.tensorflow_replicas import of_this_replica
from tfdist.runtime.host import on_host


def rows_once(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds up repeated rows of a gradient, always in the same order, so that it has no row twice."""
    with tf.name_scope("rows_once"), on_host():
        rows, place = tf.unique(slices.indices)
        return tf.IndexedSlices(
            tf.math.unsorted_segment_sum(slices.values, place, tf.size(rows)), rows, slices.dense_shape
        )


def takes_repeated_rows(table: keras.Variable | tf.Variable) -> bool:
    """Returns whether `subtracting_rows` may be given repeated rows. In a shorter type than float32 each subtraction
    would round.
    """
    return tf.as_dtype(table.dtype) == tf.float32


def subtracting_rows(optimizer: keras.Optimizer) -> Callable:
    """Returns a replacement for `optimizer.assign_sub` that subtracts slices with XLA. Not for GPUs, on which XLA, too,
    adds up in any order."""
    whole = optimizer.assign_sub

    # The product with the learning rate is computed outside: XLA must not fuse it with the subtraction, which would
    # round differently.
    @functools.partial(tf.function, jit_compile=True, autograph=False)
    def subtract(table: tf.Variable, values: tf.Tensor, rows: tf.Tensor) -> None:
        table.scatter_sub(tf.IndexedSlices(tf.cast(values, table.dtype), rows))

    def assign_sub(variable: keras.Variable | tf.Variable, value: tf.Tensor | tf.IndexedSlices) -> None:
        if not isinstance(value, tf.IndexedSlices):
            whole(variable, value)
            return
        table = of_this_replica(variable.value if isinstance(variable, keras.Variable) else variable)
        values, rows = value.values, value.indices
        # For a missing row XLA silently looks up another one, and here would silently skip it; see runtime/errors.py.
        check = tf.debugging.assert_equal(
            tf.reduce_all(tf.logical_and(rows >= 0, rows < table.shape[0])),
            True,
            f"rows of table {getattr(variable, 'path', variable.name)} are not in [0, {table.shape[0]})",
        )
        with tf.control_dependencies([] if check is None else [check]):
            rows = tf.identity(rows)
        if tf.executing_eagerly() or values.shape[0] is None:
            values, rows = filled_up(values, rows, table.shape.rank)
        subtract(table, values, rows)

    return assign_sub


def filled_up(values: tf.Tensor, rows: tf.Tensor, rank: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns slices with the same effect on a table of `rank` dims, padded with zeros for its first row to a multiple
    of an eighth of a power of two, because XLA compiles once for each length.
    """
    length = tf.shape(rows)[0]
    power = tf.math.floor(tf.math.log(tf.cast(tf.maximum(length, 1), tf.float64)) / math.log(2.0))
    unit = tf.cast(tf.pow(tf.constant(2.0, tf.float64), tf.maximum(power - 3.0, 0.0)), tf.int32)
    more = tf.stack([[0, tf.math.floormod(-length, unit)]])  # padding of the first dim: before, after
    return tf.pad(values, tf.concat([more, tf.zeros([rank - 1, 2], tf.int32)], 0)), tf.pad(rows, more)
