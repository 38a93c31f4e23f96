"""Sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198): between the layers that tensor.py spreads, each
rank of `model` holds only T / m positions.

Norms, dropout and residual sums treat every position separately, but with tensor parallelism alone all m ranks hold and
compute them for all T. Here the all-reduce after a row layer is split: only its first half, a reduce-scatter along the
sequence, stays there; its second half, the all-gather, moves before the next column layer. As many bytes travel, and
the activations in between, including those that recomputation keeps, are 1 / m as large.

    [B, T/m, D] -> norm -> all-gather -> [B, T, D] -> column ... row -> reduce-scatter -> [B, T/m, D] -> dropout, add

Variables that are whole but see only some positions (norms, the row layers' biases, learned positions) get only a part
of their gradient on each rank: `PARTIAL` names these variables, and mesh_update.py sums them over `model` as well.

Legend. B batch, T positions, D width, m ranks along `model`.
"""

from __future__ import annotations

import re
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_layers
from tfdist.control.exit_codes import ConfigError
from tfdist.runtime.collectives import Group
from tfdist.training.parallel import tensor
from tfdist.training.parallel.expert import has_experts
from tfdist.training.parallel.own_noise import own_noise
from tfdist.training.parallel.tensor import Rule, VariablePart, static_dims

PARTIAL = re.compile(r"^(embed_positions/|block_\d+_norm_\d+/|final_norm/|block_\d+_(attention_out|mlp_down)/bias$)")


def gathered(x: tf.Tensor, group: Group) -> tf.Tensor:
    """[B, T/m, D] -> [B, T, D]; its gradient is `scattered`."""
    batch, length, *rest = static_dims(x)
    y = group.all_gather(x, 1)
    return tf.ensure_shape(y, [batch, length * group.size, *rest])


def scattered(x: tf.Tensor, group: Group) -> tf.Tensor:
    """[B, T, D], different on each rank -> this rank's [B, T/m, D] of the sum; its gradient is `gathered`."""
    batch, length, *rest = static_dims(x)
    y = group.reduce_scatter(x, 1)
    return tf.ensure_shape(y, [batch, length // group.size, *rest])


def _own_positions(layer: keras.Layer, group: Group) -> dict[int, VariablePart]:
    """Makes an Embedding that is called with all positions [1, T] return [1, T/m, D]."""
    inner = layer.call

    def call(x: tf.Tensor) -> tf.Tensor:
        length = static_dims(x)[1] // group.size
        return inner(x[:, group.index * length : (group.index + 1) * length])

    layer.call = call
    return {}


# The first pattern that matches a layer applies, so that layers not listed here are treated as in tensor.py.
RULES: tuple[tuple[str, Rule], ...] = (
    (r"^embed_tokens$", tensor.vocabulary(gathered, scattered)),
    (r"^embed_positions$", _own_positions),
    (r"^embed_dropout$|^block_\d+_(attention|mlp)_dropout$", own_noise),
    (r"^block_\d+_attention_qkv$", tensor.column(blocks=3, enter=gathered)),
    (r"^block_\d+_(attention_out|mlp_down)$", tensor.row(scattered)),
    (r"^block_\d+_mlp_up$", tensor.column(enter=gathered)),
    *tensor.RULES,
)


def parallelize_sequence(
    model: keras.Model, group: Group, is_known: bool = False, rows: Any = None
) -> tuple[dict[int, VariablePart], frozenset[int]]:
    """Cuts layers like tensor.parallelize_layers, whose arguments it takes, and positions in between. Returns (parts,
    ids of `PARTIAL`).

    Raises: ConfigError if the model is not the transformer, has experts, or m does not divide its positions.
    """
    if not any(layer.name == "embed_tokens" for layer in model.layers) or has_experts(model):
        raise ConfigError(
            f"--sequence_parallel is for --model=transformer without experts, which {model.name} is not here: drop it."
        )
    for layer in keras_layers.all_layers(model, include_self=False):
        if layer.activity_regularizer is not None:
            raise ConfigError(
                f"--sequence_parallel gives each worker some of the positions only, but {layer.name} has an activity"
                " regularizer, which needs all: drop one of them."
            )
    inputs = getattr(model, "inputs", None)  # subclassed models have none
    length = inputs[0].shape[1] if inputs and len(inputs[0].shape) > 1 else None
    if length is None:
        raise ConfigError(
            f"--sequence_parallel spreads the positions over model={group.size}, but {model.name} does not say how many"
            " it has: build it with keras.Model(inputs, outputs) and a keras.Input of known length, or drop it."
        )
    if length % group.size:
        raise ConfigError(
            f"--sequence_parallel spreads the {length} positions over model={group.size}, which does not divide them:"
            " choose another --sequence_length, or drop it."
        )
    parts = tensor.parallelize_layers(model, group, rules=RULES, is_known=is_known, rows=rows)
    return parts, frozenset(id(variable) for variable in model.trainable_variables if PARTIAL.match(variable.path))
