"""LayerNormalization and GELU in training steps on CPUs: each a few loops that XLA compiles.

Keras composes them of a dozen operations, each of which reads and writes all of its tensors; broadcasting a number for
each row costs TensorFlow several times as much again. Forward and backward on one core of a Xeon, float32, Keras
against this file: LayerNormalization of 1024 x 384 12 ms and 3, GELU of 1024 x 1536 30 ms and 3 (docs/speed_log.md).

Legend: N rows, D their width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.compat import keras_functions, tensorflow_vectorized, tensorflow_xla
from tfdist.runtime.scopes import ThreadScope

LEAST = 1 << 14  # elements: below this, calling an XLA-compiled function costs as much as it gains
_ROWS = 8  # rows assumed if a batch may have any number
_compiled = functools.partial(tf.function, jit_compile=True, autograph=False)
in_steps = ThreadScope()  # a step is being traced; any other graph may be exported, and would need XLA for serving


def compile_functions() -> None:
    """Makes Keras' LayerNormalization and "gelu" compiled from now on within `in_steps`, on machines without a GPU (on
    one XLA compiles the whole step), for float32 tensors whose shape is known except for the number of rows."""
    keras_functions.replace_gelu(_gelu_where_possible)
    keras_functions.replace_layer_normalization(_normalization_where_possible)


def _suits(x: Any) -> bool:
    if not (in_steps.is_here and isinstance(x, tf.Tensor) and x.dtype == tf.float32) or tf.executing_eagerly():
        return False
    if x.shape.rank is None or x.shape.rank < 2 or not x.shape[1:].is_fully_defined():
        return False  # XLA would compile again for each length
    elements = (x.shape[0] or _ROWS) * (x.shape[1:].num_elements() or 0)
    is_alone = not tensorflow_xla.is_compiled_by_xla() and not tensorflow_vectorized.is_here()
    return elements >= LEAST and is_alone and not tf.config.list_logical_devices("GPU")


# -- GELU --------------------------------------------------------------------------------------------------------------
# Hendrycks, Gimpel 2016, arXiv:1606.08415: x * Phi(x), or with Phi(x) = (1 + tanh(u)) / 2, u = c * (x + k * x^3).

_C, _K = math.sqrt(2 / math.pi), 0.044715
_ALL = 5.5  # for |x| beyond this, Phi(x) is 0 or 1 up to 2e-8


def _tanh_of(x: tf.Tensor) -> tf.Tensor:
    return tf.tanh(_C * (x + _K * x * x * x))


@_compiled
def _gelu_tanh(x: tf.Tensor) -> tf.Tensor:
    return 0.5 * x * (1 + _tanh_of(x))


@_compiled
def _gelu_tanh_gradient(x: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
    tanh = _tanh_of(x)
    return upstream * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * _C * (1 + 3 * _K * x * x))


def _phi_of(x: tf.Tensor) -> tf.Tensor:
    phi = 0.5 * (1 + tf.math.erf(x * math.sqrt(0.5)))
    # XLA's erf does not exceed 1 - 2e-7; this error is no longer small when multiplied by a large x.
    return tf.where(x > _ALL, tf.ones_like(x), tf.where(x < -_ALL, tf.zeros_like(x), phi))


@_compiled
def _gelu_erf(x: tf.Tensor) -> tf.Tensor:
    return x * _phi_of(x)


@_compiled
def _gelu_erf_gradient(x: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
    return upstream * (_phi_of(x) + x * tf.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))


def _gelu_where_possible(of_keras: Callable) -> Callable:
    @tf.custom_gradient
    def by_tanh(x: tf.Tensor) -> Any:
        return _gelu_tanh(x), lambda upstream: _gelu_tanh_gradient(x, upstream)

    @tf.custom_gradient
    def by_erf(x: tf.Tensor) -> Any:
        return _gelu_erf(x), lambda upstream: _gelu_erf_gradient(x, upstream)

    def gelu(x: Any, approximate: bool = True) -> Any:
        if _suits(x):
            return by_tanh(x) if approximate else by_erf(x)
        return of_keras(x, approximate)

    return gelu


# -- LayerNormalization ------------------------------------------------------------------------------------------------
# Ba, Kiros, Hinton 2016, arXiv:1607.06450: for rows [N, D], (x - mean) / sqrt(variance + epsilon) * gamma + beta.


def _mean(x_ND: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(x_ND, -1, keepdims=True)


@_compiled
def _normalized(x_ND: tf.Tensor, gamma_D: tf.Tensor, beta_D: tf.Tensor, epsilon: tf.Tensor) -> tuple:
    """Returns (the outputs [N, D], the means [N, 1], one over the standard deviations [N, 1])."""
    mean_N1 = _mean(x_ND)
    centered_ND = x_ND - mean_N1
    inverse_N1 = tf.math.rsqrt(_mean(centered_ND * centered_ND) + epsilon)
    return centered_ND * inverse_N1 * gamma_D + beta_D, mean_N1, inverse_N1


@_compiled
def _gradient_of_rows(
    x_ND: tf.Tensor, gamma_D: tf.Tensor, mean_N1: tf.Tensor, inverse_N1: tf.Tensor, upstream_ND: tf.Tensor
) -> tf.Tensor:
    normal_ND, scaled_ND = (x_ND - mean_N1) * inverse_N1, upstream_ND * gamma_D
    return inverse_N1 * (scaled_ND - _mean(scaled_ND) - normal_ND * _mean(scaled_ND * normal_ND))


@_compiled
def _gradients_of_weights(
    x_ND: tf.Tensor, mean_N1: tf.Tensor, inverse_N1: tf.Tensor, upstream_ND: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the gradients of gamma and beta. Separate from the gradient of the rows: XLA would fuse all into one slow
    loop."""
    return tf.reduce_sum(upstream_ND * ((x_ND - mean_N1) * inverse_N1), 0), tf.reduce_sum(upstream_ND, 0)


@tf.custom_gradient
def _layer_normalized(x_ND: tf.Tensor, gamma_D: tf.Tensor, beta_D: tf.Tensor, epsilon: tf.Tensor) -> Any:
    y_ND, mean_N1, inverse_N1 = _normalized(x_ND, gamma_D, beta_D, epsilon)

    def gradient(upstream_ND: tf.Tensor) -> tuple:
        of_x_ND = _gradient_of_rows(x_ND, gamma_D, mean_N1, inverse_N1, upstream_ND)
        return of_x_ND, *_gradients_of_weights(x_ND, mean_N1, inverse_N1, upstream_ND), None

    return y_ND, gradient


def _normalization_where_possible(of_keras: Callable) -> Callable:
    def layer_normalization(
        x: Any, gamma: Any = None, beta: Any = None, axis: Any = -1, epsilon: Any = None, rms_scaling: bool = False
    ) -> Any:
        suits = isinstance(epsilon, float) and not rms_scaling and _suits(x) and _is_the_last(axis, x.shape.rank)
        # Others may have a value for each row, or have to be broadcast.
        if not suits or any(x.shape[-1:] != getattr(weight, "shape", None) for weight in (gamma, beta)):
            return of_keras(x, gamma, beta, axis, epsilon, rms_scaling)
        gamma_D, beta_D = (tf.cast(tf.convert_to_tensor(weight), x.dtype) for weight in (gamma, beta))
        x_ND = tf.reshape(x, [-1, x.shape[-1]])
        y_ND = _layer_normalized(x_ND, gamma_D, beta_D, tf.constant(epsilon, x.dtype))
        return tf.ensure_shape(tf.reshape(y_ND, tf.shape(x)), x.shape)

    return layer_normalization


def _is_the_last(axis: Any, rank: int) -> bool:
    axes = list(axis) if isinstance(axis, (list, tuple)) else [axis]
    return len(axes) == 1 and axes[0] % rank == rank - 1
