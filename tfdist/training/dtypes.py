"""Models whose variables have several dtypes: the form in which gradients are added up, and norms over all of them.

Gradients of float16 and bfloat16 variables are added up (over micro-batches and replicas) and scaled in float32; the
optimizer rounds them to the variable's own type. Gradients of float64 variables stay float64 all the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import keras
import tensorflow as tf

from tfdist.compat.tensorflow_variables import read_in_place

Gradient = tf.Tensor | tf.IndexedSlices


def at_least_float32(gradient: Gradient) -> Gradient:
    """Casts float16 and bfloat16 gradients to float32: no sum or square of them overflows or loses small numbers."""
    if gradient.dtype not in (tf.float16, tf.bfloat16):
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(tf.cast(gradient.values, tf.float32), gradient.indices, gradient.dense_shape)
    return tf.cast(gradient, tf.float32)


def values_of(gradient: Gradient) -> tf.Tensor:
    """Returns the numbers of a gradient; for slices, the numbers of the rows that they hold."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def scaled(piece: Gradient, factor: float | tf.Tensor) -> Gradient:
    """Returns a gradient, or a piece of one, times a factor, in the gradient's dtype."""
    # tf.cast would make a number of Python float32 first.
    factor = tf.cast(factor, piece.dtype) if isinstance(factor, tf.Tensor) else tf.constant(factor, piece.dtype)
    if isinstance(piece, tf.IndexedSlices):
        return tf.IndexedSlices(piece.values * factor, piece.indices, piece.dense_shape)
    return piece * factor


def with_zeros(gradients: Sequence[Gradient | None], sources: Sequence) -> list[Gradient]:
    """Returns a tape's gradients for `sources`, with zeros where there is no gradient."""
    return [
        tf.zeros_like(source) if gradient is None else gradient
        for gradient, source in zip(gradients, sources, strict=True)
    ]


def as_summands(gradients: Sequence[Gradient], variables: Sequence[tf.Tensor | tf.Variable]) -> list[Gradient]:
    """Returns a tape's gradients for `variables`, ready to be added up. If a shape is unknown while tracing (as of a
    kernel's gradient if the number of rows is unknown), the gradient gets the variable's shape: buckets and shards are
    cut while tracing."""
    for gradient, variable in zip(gradients, variables, strict=True):
        if not isinstance(gradient, tf.IndexedSlices):
            gradient.set_shape(variable.shape)
    return [at_least_float32(gradient) for gradient in gradients]


def zero_summands(variables: Iterable[tf.Variable]) -> list[tf.Tensor]:
    """Returns zeros to which the results of `as_summands` can be added."""
    return [tf.convert_to_tensor(at_least_float32(tf.zeros_like(variable))) for variable in variables]


def norm_dtype(tensors: Iterable[Gradient | tf.Variable | keras.Variable]) -> tf.DType:
    """Returns the dtype for adding up the squares of all tensors: float64 if one is float64, whose squares may exceed
    float32."""
    return tf.float64 if any(tf.as_dtype(tensor.dtype) == tf.float64 for tensor in tensors) else tf.float32


def global_norm(tensors: Sequence[Gradient | tf.Variable]) -> tf.Tensor:
    """float32 []: the norm of all elements. For float32 tensors the same bits as tf.linalg.global_norm."""
    dtype = norm_dtype(tensors)
    halves = [tf.cast(tf.nn.l2_loss(at_least_float32(_elements(tensor))), dtype) for tensor in tensors]
    return tf.cast(tf.sqrt(tf.reduce_sum(tf.stack(halves)) * tf.constant(2.0, dtype)), tf.float32)


def _elements(tensor: Gradient | tf.Variable) -> tf.Tensor:
    return read_in_place(tensor) if isinstance(tensor, tf.Variable) else tf.convert_to_tensor(values_of(tensor))


OfOneDtype = Callable[[list[tf.Tensor], list[int]], Sequence[tf.Tensor]]


def of_each_dtype(function: OfOneDtype, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Calls `function`, for each dtype, with the tensors of that dtype and their places. Returns the results in the
    order of `tensors`.
    """
    results: list = [None] * len(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        for place, result in zip(places, function([tensors[place] for place in places], places), strict=True):
            results[place] = result
    return results
