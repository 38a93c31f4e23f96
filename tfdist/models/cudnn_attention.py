"""Attention with cuDNN's kernel in TensorFlow, the same attention by formula, and the error of the kernel against it.

XLA includes the kernel ("__cudnn$fmhaSoftmax", which JAX calls by the same name): a function that XLA compiles can call
it. It never writes the weights of [B, N, T, S] to memory (FlashAttention, Dao et al. 2022, arXiv:2205.14135).

Shapes as in Keras: B batch, T queries, S keys, N heads, H numbers in each.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.compat import tensorflow_xla
from tfdist.models.short_softmax import short_softmax
from tfdist.runtime.host import known_dims

DTYPES = {tf.float16: "F16", tf.bfloat16: "BF16"}  # -> their names in XLA
_MASKED = -1e9
_WORKSPACE = (tf.uint8, [0])  # XLA determines the size


@dataclass(frozen=True)
class Scores:
    """How the products of queries and keys become the scores of the softmax.

    Args: scale: factor of the products; is_causal: query t sees keys 0..t; mask: bool [B or 1, N or 1, T, S], whether a
    query sees a key, or None. If both are given, a query sees a key only if both allow it.
    """

    scale: float
    is_causal: bool
    mask: tf.Tensor | None

    def seen(self, query: tf.Tensor, key: tf.Tensor) -> tf.Tensor | None:
        """Returns whether each query sees each key, bool, [..., T, S]; None if all do. query [B, T, N, H], key
        [B, S, N, H]."""
        if not self.is_causal:
            return self.mask
        queries, keys = known_dims(query.shape)[1], known_dims(key.shape)[1]
        causal = tf.range(queries)[:, None] >= tf.range(keys)
        return causal if self.mask is None else causal & self.mask


def cudnn_attention(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, scores: Scores) -> tf.Tensor:
    """Computes softmax(scores) value, [B, T, N, H], with cuDNN, and its gradient. A query that sees no key gets the
    mean of all values, as in Keras.

    Args: query [B, T, N, H], key and value [B, S, N, H], float16 or bfloat16, of static shapes. To be called in a
    function that XLA compiles for a GPU; elsewhere XLA reports that it has no implementation.
    """
    bias = _bias(scores.mask, query.dtype)

    @tf.custom_gradient
    def attention(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, Any]:
        output, statistics = _forward(query, key, value, bias, scores)

        @tf.custom_gradient
        def gradient(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, upstream: tf.Tensor) -> tuple[list, Any]:
            found = _backward(query, key, value, output, statistics, upstream, bias, scores)

            def of_gradient(*upstreams: tf.Tensor) -> list[tf.Tensor]:
                """Returns the gradient of the gradient, which cuDNN lacks; a gradient penalty, for example, uses it."""
                by_formula = with_gradients(attention_by_formula, scores)
                inputs = [query, key, value, upstream]
                with tf.GradientTape() as tape:
                    tape.watch(inputs)
                    gradients = by_formula(*inputs)[1:]
                second: Any = tape.gradient(gradients, inputs, output_gradients=list(upstreams))
                return second

            return found, of_gradient

        return output, lambda upstream: gradient(query, key, value, upstream)

    output: Any = attention(query, key, value)  # returns the output alone, although its type includes the gradient
    if scores.mask is None:
        return output
    sees_any_BNT1 = tf.reduce_any(scores.seen(query, key), -1, keepdims=True)
    mean = tf.cast(tf.reduce_mean(tf.cast(value, tf.float32), 1, keepdims=True), value.dtype)
    return tf.where(_swapped(sees_any_BNT1), output, mean)


def _bias(mask: tf.Tensor | None, dtype: tf.DType) -> tf.Tensor | None:
    """Returns the numbers that are added to the scores for a mask, the same as in JAX: larger numbers trigger a bug in
    cuDNN."""
    if mask is None:
        return None
    return tf.where(mask, tf.cast(0, dtype), tf.cast(-(2.0**41) if dtype == tf.bfloat16 else -(2.0**15), dtype))


def _forward(
    query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, bias: tf.Tensor | None, scores: Scores
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the output [B, T, N, H], and the statistics of each row of scores that the backward pass needs: float32
    [B, N, T]."""
    by_head = [_swapped(x) for x in (query, key, value)]
    batch, heads, queries, width = known_dims(by_head[0].shape)
    output_BNTH, statistics, _ = tensorflow_xla.custom_call(
        "__cudnn$fmhaSoftmax" if bias is None else "__cudnn$fmhaScaleBiasSoftmax",
        [*by_head, *([] if bias is None else [bias])],
        _config(by_head[0], by_head[1], scores, _FORWARD),
        [(query.dtype, [batch, heads, queries, width]), (tf.float32, [batch, heads, queries]), _WORKSPACE],
    )
    return _swapped(output_BNTH), statistics


def _backward(
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    output: tf.Tensor,
    statistics: tf.Tensor,
    upstream: tf.Tensor,
    bias: tf.Tensor | None,
    scores: Scores,
) -> list[tf.Tensor]:
    """Returns the gradients of query, key and value."""
    by_head = [_swapped(x) for x in (query, key, value)]
    *found, _ = tensorflow_xla.custom_call(
        "__cudnn$fmhaSoftmaxBackward" if bias is None else "__cudnn$fmhaScaleBiasSoftmaxBackward",
        [*by_head, statistics, _swapped(upstream), *([] if bias is None else [bias]), _swapped(output)],
        _config(by_head[0], by_head[1], scores, _BACKWARD),
        [*((x.dtype, known_dims(x.shape)) for x in by_head), _WORKSPACE],
    )
    return [_swapped(x) for x in found]


def _swapped(x: tf.Tensor) -> tf.Tensor:
    """Swaps heads and positions: [B, T, N, H] <-> [B, N, T, H]."""
    return tf.transpose(x, (0, 2, 1, 3))


# The dims, left and right, over which each matrix product sums; B and N are batch dims of both (XLA's
# CudnnfMHABackendConfig, as JAX fills it: jax/_src/cudnn/fused_attention_stablehlo.py).
_FORWARD = {"bmm1": (3, 3), "bmm2": (3, 2)}
_BACKWARD = {
    "bmm1_grad_gemm1": (2, 2),
    "bmm1_grad_gemm2": (3, 2),
    "bmm2_grad_gemm1": (2, 2),
    "bmm2_grad_gemm2": (3, 3),
}


def _config(query: tf.Tensor, key: tf.Tensor, scores: Scores, products: dict[str, tuple[int, int]]) -> str:
    dims = {
        f"{name}_dot_dimension_numbers": {
            "lhs_contracting_dimensions": [str(left)],
            "rhs_contracting_dimensions": [str(right)],
            "lhs_batch_dimensions": ["0", "1"],
            "rhs_batch_dimensions": ["0", "1"],
        }
        for name, (left, right) in products.items()
    }
    intermediate = {
        "element_type": DTYPES[query.dtype],
        "dimensions": [str(size) for size in (*query.shape[:3], key.shape[2])],
        "layout": {"minor_to_major": ["3", "2", "1", "0"]},
        "is_dynamic_dimension": [False] * 4,
    }
    algorithm = {
        "algo_id": "0",
        "math_type": "TENSOR_OP_MATH",
        "tuning_knobs": {"17": "1", "24": "0"},
        "is_cudnn_frontend": True,
        "workspace_size": "0",
    }
    return json.dumps(
        {
            "operation_queue_id": "0",
            "cudnn_fmha_backend_config": {
                "algorithm": algorithm,
                "fmha_scale": scores.scale,
                "intermediate_tensor_shape": intermediate,
                "is_flash_attention": True,
                "mask_type": "CAUSAL" if scores.is_causal else "NO_MASK",
                "dropout_rate": 0.0,
                "seed": 42,
                "sliding_window_length": 0,
                "max_seg_per_batch": 1,
                "is_paged_attention": False,
                **dims,
            },
        }
    )


def distance(
    dtype: tf.DType, sizes: tuple[int, int, int, int, int], scale: float, is_causal: bool, is_masked: bool
) -> float:
    """Returns the relative error of cuDNN's output and three gradients against the formula in float32, for random
    inputs: the largest of the norms of the differences, each relative to the norm. sizes: B, T, S, N, H."""
    inputs = random_inputs(dtype, sizes)
    scores = Scores(scale, is_causal, random_mask((sizes[0], 1, *sizes[1:3])) if is_masked else None)
    fused = tf.function(with_gradients(cudnn_attention, scores), jit_compile=True, autograph=False)
    found = fused(*inputs)
    expected = with_gradients(attention_by_formula, scores)(*(tf.cast(x, tf.float32) for x in inputs))
    return max(
        float(tf.norm(tf.cast(one, tf.float32) - other) / tf.norm(other))
        for one, other in zip(found, expected, strict=True)
    )


def random_inputs(dtype: tf.DType, sizes: tuple[int, int, int, int, int]) -> list[tf.Tensor]:
    """Returns random query, key, value and gradient of the output, always the same. sizes: B, T, S, N, H."""
    batch, queries, keys, heads, width = sizes
    positions = (queries, keys, keys, queries)
    return [
        tf.cast(tf.random.stateless_normal((batch, each, heads, width), (7, number)), dtype)
        for number, each in enumerate(positions)
    ]


def random_mask(sizes: tuple[int, int, int, int]) -> tf.Tensor:
    """Returns a random mask, always the same: about half of the keys are seen, and, as with padding, the first query of
    the first row sees none. sizes: B, N, T, S; B and N may be 1.
    """
    mask = tf.random.stateless_uniform(sizes, (7, 9)) < 0.5
    return mask & (tf.reshape(tf.range(tf.reduce_prod(sizes)), sizes) >= sizes[-1])


def with_gradients(attention: Any, scores: Scores) -> Any:
    """Returns a function (query, key, value, gradient of the output) -> [output, and the gradients of the three]."""

    def compute(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, upstream: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch([query, key, value])
            output = attention(query, key, value, scores)
        found: Any = tape.gradient([output], [query, key, value], output_gradients=[upstream])
        return [output, *found]

    return compute


def attention_by_formula(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, scores: Scores) -> tf.Tensor:
    """Computes the same as `cudnn_attention` with TensorFlow's operations, in float16, bfloat16 or float32."""
    scores_BNTS = scores.scale * tf.cast(tf.einsum("btnh,bsnh->bnts", query, key), tf.float32)
    seen = scores.seen(query, key)
    if seen is not None:
        scores_BNTS = tf.where(seen, scores_BNTS, _MASKED)
    weights_BNTS = tf.cast(short_softmax(scores_BNTS, -1, value.dtype), value.dtype)
    return tf.einsum("bnts,bsnh->btnh", weights_BNTS, value)
