"""Keeps Keras from taking a number for each row for a bias of the channels where it knows how many rows there are."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.src import backend

from tfdist.compat.tensorflow_graphs import inputs_of, operations_behind


def add_rows_to_rows() -> None:
    """Makes Keras add what it adds where it does not know the number of rows, as in `keras.Model.fit`.

    Keras 3.15 takes a second operand with a single dim above 1 for a bias of the channels if that dim is as long as the
    last dim, or the dim after the rows, of the first operand. So [B, D] + [B, 1] adds number d to channel d, and mixes
    rows, if B = D: with 16 channels, in batches of 16 rows and in no others. [B, T, D] + [B, T, 1] mixes up channels if
    T = D and B = 1. `keras.Model.fit` does not know the number of rows, but a step of tfdist does. Weights and
    constants stay with Keras' rule also where its sum is not that of NumPy: so a model computes the same everywhere.
    Changes the whole process, once. Relies on the backend's `add`, with which all of Keras adds.
    """
    if not hasattr(backend.numpy.add, "of_keras"):
        backend.numpy.add = _with_rows_as_rows(backend.numpy.add)


def _with_rows_as_rows(add: Any) -> Any:
    def added(x1: Any, x2: Any) -> Any:
        if not _may_be_rows_like_a_bias(x2, x1):
            return add(x1, x2)
        x1, x2 = (keras.ops.convert_to_tensor(each, sparse=False) for each in (x1, x2))
        dtype = keras.backend.result_type(x1.dtype, x2.dtype)
        return tf.add(tf.cast(x1, dtype), tf.cast(x2, dtype))

    added.of_keras = add
    return added


def _may_be_rows_like_a_bias(other: Any, x: Any) -> bool:
    """Whether `other` has a single dim above 1, as a bias, but may have the rows of the batch in its first dim. Where
    their number is unknown, Keras takes nothing with rows for a bias, and it adds none to an x of one dim or a number
    (whose type would be lost in a tensor)."""
    shapes: list[Any] = [getattr(each, "shape", ()) for each in (other, x)]
    if any(getattr(shape, "rank", 0) is None for shape in shapes):
        return False
    shape, of_x = map(tuple, shapes)
    if len([size for size in shape if size is None or size > 1]) != 1 or not 2 <= len(of_x) <= len(shape):
        return False
    is_one_for_all_rows = len(shape) == len(of_x) and shape[0] == 1 and of_x[0] != 1
    return not is_one_for_all_rows and not _is_made_of_weights(other)


def _is_made_of_weights(value: Any) -> bool:
    """Whether a value is made of weights and constants alone. False for an eager tensor, which does not tell."""
    if not isinstance(value, tf.Tensor):
        return True
    if not hasattr(value, "graph"):
        return not tf.executing_eagerly()  # in a graph it is a constant
    behind = operations_behind([value.op], lambda operation: [] if _is_weight(operation) else inputs_of(operation))
    return all(_is_weight(operation) or operation.inputs for operation in behind)


def _is_weight(operation: tf.Operation) -> bool:
    is_variable = any(output.dtype == tf.resource for output in operation.outputs)
    return is_variable or operation.type in ("Const", "ReadVariableOp")
