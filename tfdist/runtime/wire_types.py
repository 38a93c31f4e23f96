"""The dtypes in which tensors travel that are only copied: few dtypes, so that many tensors travel together.

GPUs can pad, cut and join all of these, but not int32 and int64.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

_BY_BYTES = {2: tf.float16, 4: tf.float32, 8: tf.float64}
_WIDENED = (tf.bool, tf.int8, tf.uint8)


def on_wire(tensor: tf.Tensor) -> tf.Tensor:
    """The bits as float16, float32 or float64; complex128 gets one more dim, one-byte types are widened."""
    if tensor.dtype in _WIDENED:
        tensor = tf.cast(tensor, tf.int32)
    return tf.bitcast(tensor, _BY_BYTES.get(tensor.dtype.size, tf.float64))


def off_wire(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the tensor, of this dtype, that was given to `on_wire`."""
    if dtype in _WIDENED:
        return tf.cast(tf.bitcast(tensor, tf.int32), dtype)
    return tf.bitcast(tensor, dtype)


def of_one_type(tensors: Sequence[tf.Tensor]) -> list[list[int]]:
    """Returns groups of places: the tensors of a group can travel together."""
    types = dict.fromkeys(tensor.dtype for tensor in tensors)
    return [[place for place, tensor in enumerate(tensors) if tensor.dtype == dtype] for dtype in types]


def joined(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """All elements of the tensors in one dim."""
    flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
    return tf.concat(flat, 0) if len(flat) > 1 else flat[0]
