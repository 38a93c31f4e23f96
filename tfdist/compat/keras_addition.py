"""Corrects Keras' addition of a number per row, or per position, to all channels."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.src import backend


def add_rows_to_rows() -> None:
    """Makes Keras' sums those of NumPy, for a known number of rows as for an unknown one.

    Keras 3.15 takes a second operand with a single dim above 1 for a bias of the channels if that dim is as long as the
    last dim, or the dim after the rows, of the first operand. So [B, D] + [B, 1] adds number d to channel d, and mixes
    rows, if B = D: with 16 channels, in batches of 16 rows and in no others. [B, T, D] + [B, T, 1] mixes up channels if
    T = D and B = 1. `keras.Model.fit` does not know the number of rows, but a step of tfdist does. Changes the whole
    process, once. Relies on the backend's `add`, with which all of Keras adds.
    """
    if not hasattr(backend.numpy.add, "is_of_numpy"):
        backend.numpy.add = _of_numpy(backend.numpy.add)


def _of_numpy(add: Any) -> Any:
    def added(x1: Any, x2: Any) -> Any:
        shapes = [getattr(each, "shape", ()) for each in (x1, x2)]
        if any(getattr(shape, "rank", 0) is None for shape in shapes) or not _is_mistaken_for_bias(*map(tuple, shapes)):
            return add(x1, x2)
        x1, x2 = (keras.ops.convert_to_tensor(each, sparse=False) for each in (x1, x2))
        dtype = keras.backend.result_type(x1.dtype, x2.dtype)
        return tf.add(tf.cast(x1, dtype), tf.cast(x2, dtype))

    added.is_of_numpy = True
    return added


def _is_mistaken_for_bias(shape: tuple, other: tuple) -> bool:
    """Whether Keras adds `other` along another dim of `shape` than NumPy does, or forgets a dim."""
    long = [(place - len(other), size) for place, size in enumerate(other) if size is None or size > 1]
    if len(long) != 1 or len(shape) < 2 or long[0][1] not in (shape[1], shape[-1]) or long[0][1] is None:
        return False
    place, size = long[0]
    taken = -1 if shape[-1] == size else 1 - len(shape)
    return len(other) > len(shape) or (place != taken and shape[place] in (1, size, None))
