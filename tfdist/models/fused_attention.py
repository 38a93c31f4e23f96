"""Attention in half precision on GPUs with one kernel of cuDNN, which Keras offers with JAX and PyTorch only.

GPT-2 124M on an H100: 253,000 tokens a second without it, 418,000 with it, compiled PyTorch 327,500: docs/speed_log.md.
The kernel also needs less memory and rounds less: scores and weights stay in float32 inside it (cudnn_attention.py).
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat import keras_attention, tensorflow_xla
from tfdist.control.terminal import say
from tfdist.control.user_errors import first_line
from tfdist.models.cudnn_attention import DTYPES, Scores, attention_by_formula, cudnn_attention, distance
from tfdist.runtime.host import known_dims

TOLERANCE = 0.02  # relative to the norm; bfloat16 rounds each number by up to 0.004 of it
_TRIED_POSITIONS = 1024  # at most, as the formula in the trial writes the weights of [B, N, T, S] to memory


def fuse_attention() -> None:
    """Makes Keras' MultiHeadAttention and `keras.ops.dot_product_attention` use cuDNN's kernel, in this process, where
    possible: on GPUs of compute capability 8.0 or newer, in a function that XLA compiles, in half precision, without
    bias or dropout of the weights, with H a multiple of 8 up to 128 (from 9.0 on 256), and, if there is a mask, even
    numbers of positions. (cuDNN's dropout counts its own calls: a resumed run would draw different numbers.) On other
    GPUs the same attention keeps half precision for its gradient (short_softmax.py); everything else is computed as
    before. `keras.config.disable_flash_attention()` turns cuDNN's kernel off.

    The first use for a shape tries the kernel against the formula in float32; if this fails, a warning is printed, and
    the kernel is not used.
    """
    keras_attention.replace_attention(_fused_where_possible)


def is_one_operation(dropout: float) -> bool:
    """Returns whether a model of tfdist should call `keras.ops.dot_product_attention`, so that `fuse_attention` takes
    effect: on GPUs, in half precision and without dropout of the weights. (On a CPU Keras' formula is 2 % slower than
    the one in blocks.py.)
    """
    return _has_gpu() and not dropout and tf.as_dtype(keras.config.dtype_policy().compute_dtype) in DTYPES


def _has_gpu() -> bool:
    return bool(tf.config.list_logical_devices("GPU"))


def _fused_where_possible(of_keras: keras_attention.Attention) -> keras_attention.Attention:
    def dot_product_attention(
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        mask: Any = None,
        scale: Any = None,
        is_causal: bool = False,
        **options: Any,  # flash_attention, attn_logits_soft_cap
    ) -> Any:
        is_plain = bias is None and not any(options.values())
        factor = _number(scale, query) if is_plain and _has_gpu() else None
        if factor is not None and _are_alike(query, key, value, is_causal) and _fits(mask, query, key):
            scores = Scores(factor, is_causal, None if mask is None else _over_positions(mask, query, key))
            is_off = options.get("flash_attention") is False or keras.config.is_flash_attention_enabled() is False
            if not is_off and tensorflow_xla.is_compiled_by_xla() and _is_had(query, key, scores):
                return cudnn_attention(query, key, value, scores)
            return attention_by_formula(query, key, value, scores)
        return of_keras(query, key, value, bias, mask, scale, is_causal, **options)

    return dot_product_attention


def _number(scale: Any, query: Any) -> float | None:
    """Returns the factor of the scores; None if it is only known when the step runs."""
    if scale is None:
        return None if query.shape[-1] is None else query.shape[-1] ** -0.5
    return float(scale) if isinstance(scale, (int, float, np.number)) else None


def _are_alike(query: Any, key: Any, value: Any, is_causal: bool) -> bool:
    """Returns whether these are three tensors of the same half precision, with static shapes that fit each other."""
    tensors = (query, key, value)
    if not all(isinstance(x, tf.Tensor) and x.dtype in DTYPES and x.shape.is_fully_defined() for x in tensors):
        return False
    (batch, queries, heads, width), keys = query.shape, key.shape[1]
    fits = key.shape == value.shape == (batch, keys, heads, width) and query.dtype == key.dtype == value.dtype
    return fits and min(batch, queries, keys) > 0 and (queries == keys or not is_causal)


def _fits(mask: Any, query: tf.Tensor, key: tf.Tensor) -> bool:
    """Returns whether the mask is None, or a bool tensor of shape [B, N, T, S], in which each dim may be 1."""
    if mask is None:
        return True
    (batch, queries, heads, _), keys = query.shape, key.shape[1]
    if not (isinstance(mask, tf.Tensor) and mask.dtype == tf.bool and mask.shape.is_fully_defined()):
        return False
    whole = (batch, heads, queries, keys)
    return mask.shape.rank == 4 and all(mask_dim in (1, dim) for mask_dim, dim in zip(mask.shape, whole, strict=True))


def _over_positions(mask: tf.Tensor, query: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Broadcasts a mask to [B or 1, N or 1, T, S]: cuDNN broadcasts it over rows and heads, but not over positions."""
    return tf.broadcast_to(mask, [*known_dims(mask.shape)[:2], query.shape[1], key.shape[1]])


def _is_had(query: tf.Tensor, key: tf.Tensor, scores: Scores) -> bool:
    """Returns whether cuDNN has a kernel for these shapes, and its results are right."""
    (_, queries, _, width), (_, keys, _, _) = known_dims(query.shape), known_dims(key.shape)
    is_masked = scores.mask is not None
    if width % 8 or width > _widest_head() or is_masked and (queries % 2 or keys % 2):
        return False
    tried = min(queries, _TRIED_POSITIONS), min(keys, _TRIED_POSITIONS)
    return _is_right(query.dtype, *tried, width, scores.scale, scores.is_causal, is_masked)


@functools.cache
def _widest_head() -> int:
    """Returns the widest head for which all GPUs of this process have the kernel; 0 if a GPU lacks it, or there is no
    GPU."""
    gpus = tf.config.get_visible_devices("GPU")
    found = [tf.config.experimental.get_device_details(gpu).get("compute_capability", (0, 0)) for gpu in gpus]
    oldest = min(found, default=(0, 0))
    return 256 if oldest >= (9, 0) else 128 if oldest >= (8, 0) else 0


@functools.cache
def _is_right(
    dtype: tf.DType, queries: int, keys: int, width: int, scale: float, is_causal: bool, is_masked: bool
) -> bool:
    """Tries the kernel: returns whether results and gradients equal those of the formula up to rounding. Done once for
    each set of arguments; takes about a second."""
    try:
        # In a separate thread, as this one is tracing a step, with its graph, tape and device.
        with ThreadPoolExecutor(1) as thread:
            off = thread.submit(distance, dtype, (2, queries, keys, 2, width), scale, is_causal, is_masked).result()
        wrong = f"is {off:.2g} off the formula" if not off <= TOLERANCE else ""
    except Exception as error:  # for any error of cuDNN, XLA or TensorFlow the formula can be used instead
        wrong = f"fails: {first_line(error):.200}"
    if wrong:
        say(
            f"warning: cuDNN's attention of {queries} x {keys} positions, {width} wide, in {dtype.name} {wrong}: the"
            " formula is used, which is slower and takes more memory."
        )
    return not wrong
