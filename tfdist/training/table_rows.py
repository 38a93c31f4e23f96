"""Updates of single rows of a table, on a CPU: the same bits on every replica, whatever the number of threads.

TensorFlow's own update (`scatter_sub`) takes rows that are there several times in the order in which its threads come:
each replica would round in its own way, and they would drift apart. A loop compiled by XLA takes them in the order of
the slices, in a ninth of the time.
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
    """Adds up repeated rows of a gradient in one order, so that it has no row twice."""
    with tf.name_scope("rows_once"), on_host():
        rows, place = tf.unique(slices.indices)
        return tf.IndexedSlices(
            tf.math.unsorted_segment_sum(slices.values, place, tf.size(rows)), rows, slices.dense_shape
        )


def takes_repeated_rows(table: keras.Variable | tf.Variable) -> bool:
    """Whether `subtracting_rows` may be given rows that are there several times. In a shorter type than float32 each
    subtraction would round.
    """
    return tf.as_dtype(table.dtype) == tf.float32


def subtracting_rows(optimizer: keras.Optimizer) -> Callable:
    """A replacement of `optimizer.assign_sub`, of which slices are subtracted by XLA. On a GPU XLA, too, adds up in any
    order."""
    whole = optimizer.assign_sub

    # The product with the learning rate was before: XLA may not make one operation of it and the subtraction, which
    # rounds in another way.
    @functools.partial(tf.function, jit_compile=True, autograph=False)
    def subtract(table: tf.Variable, values: tf.Tensor, rows: tf.Tensor) -> None:
        table.scatter_sub(tf.IndexedSlices(tf.cast(values, table.dtype), rows))

    def assign_sub(variable: keras.Variable | tf.Variable, value: tf.Tensor | tf.IndexedSlices) -> None:
        if not isinstance(value, tf.IndexedSlices):
            whole(variable, value)
            return
        table = of_this_replica(variable.value if isinstance(variable, keras.Variable) else variable)
        values, rows = value.values, value.indices
        # XLA looks up another row, and would leave this one out here, without a word; see runtime/errors.py.
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
    """Slices that change a table of `rank` dims as these do, filled up by zeros for its first row to a multiple of an
    eighth of a power of two: XLA compiles once for each length.
    """
    length = tf.shape(rows)[0]
    power = tf.math.floor(tf.math.log(tf.cast(tf.maximum(length, 1), tf.float64)) / math.log(2.0))
    unit = tf.cast(tf.pow(tf.constant(2.0, tf.float64), tf.maximum(power - 3.0, 0.0)), tf.int32)
    more = tf.stack([[0, tf.math.floormod(-length, unit)]])  # of the first dim: before it, behind it
    return tf.pad(values, tf.concat([more, tf.zeros([rank - 1, 2], tf.int32)], 0)), tf.pad(rows, more)
