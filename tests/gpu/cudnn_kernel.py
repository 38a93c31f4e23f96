"""Substitutes cuDNN's attention, which only a GPU has: TensorFlow's operations compute what it is asked for, from the
operands and the configuration alone.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from unittest import mock

import numpy as np
import tensorflow as tf

from tfdist.compat import tensorflow_xla
from tfdist.models import fused_attention


@contextlib.contextmanager
def cudnn_kernel() -> Iterator[list[str]]:
    """Simulates a GPU with the kernel. Yields a list, which gets the target of each call, also of those in trials."""
    calls: list[str] = []

    def custom_call(target, *args):
        calls.append(target)
        return computed(target, *args)

    with (
        mock.patch.object(tensorflow_xla, "custom_call", custom_call),
        mock.patch.object(fused_attention, "_widest_head", lambda: 128),
        mock.patch.object(fused_attention, "_has_gpu", lambda: True),
    ):
        fused_attention._is_right.cache_clear()
        fused_attention.fuse_attention()
        yield calls
    fused_attention._is_right.cache_clear()


def computed(target, operands, config, results):
    """Returns what these custom calls give according to XLA, [B, N, T, H]."""
    options = json.loads(config)["cudnn_fmha_backend_config"]
    is_backward, has_bias = target.endswith("Backward"), "ScaleBias" in target
    assert target == f"__cudnn$fmha{'ScaleBias' * has_bias}Softmax{'Backward' * is_backward}"
    query, key, value = (tf.cast(x, tf.float64) for x in operands[:3])
    assert options["intermediate_tensor_shape"]["dimensions"] == [str(n) for n in (*query.shape[:3], key.shape[2])]
    scores = options["fmha_scale"] * tf.matmul(query, key, transpose_b=True)
    if has_bias:
        bias = operands[5 if is_backward else 3]
        assert bias.dtype == operands[0].dtype and bias.shape[2:] == scores.shape[2:], "cuDNN repeats no positions"
        assert not any(size % 2 for size in bias.shape[2:]), "cuDNN has no gradient for odd numbers"
        scores += tf.cast(bias, tf.float64)
    if options["mask_type"] == "CAUSAL":
        scores = tf.where(tf.linalg.band_part(tf.ones(scores.shape[2:], bool), -1, 0), scores, -np.inf)
    weights = tf.nn.softmax(scores)
    output, statistics = tf.matmul(weights, value), tf.reduce_logsumexp(scores, -1)
    if is_backward:
        given, upstream, given_output = (tf.cast(operands[index], tf.float64) for index in (3, 4, -1))
        tf.debugging.assert_near(given, statistics, 1e-2, 1e-2)
        tf.debugging.assert_near(given_output, output, 2e-2, 2e-2)
        of_weights = tf.matmul(upstream, value, transpose_b=True)
        of_scores = weights * (of_weights - tf.reduce_sum(weights * of_weights, -1, keepdims=True))
        of_scores *= options["fmha_scale"]
        found = [
            tf.matmul(of_scores, key),
            tf.matmul(of_scores, query, transpose_a=True),
            tf.matmul(weights, upstream, transpose_a=True),
        ]
    else:
        found = [output, statistics]
    found.append(tf.zeros([0]))
    assert [x.shape.as_list() for x in found] == [list(shape) for _, shape in results]
    return [tf.cast(x, dtype) for x, (dtype, _) in zip(found, results, strict=True)]
