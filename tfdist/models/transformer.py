"""The transformer model: a decoder-only language model of the GPT-2 family (Radford et al. 2019)."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tfdist.control.exit_codes import ConfigError
from tfdist.models.blocks import EPSILON, StackOptions, block, choose_options, normal, positions
from tfdist.models.experts import choose_experts
from tfdist.models.inputs import dropout as drop
from tfdist.models.inputs import float32_logits, outputs
from tfdist.models.keras_untyped import layers
from tfdist.models.transformer_sizes import TRANSFORMERS
from tfdist.runtime.host import known_dims


def transformer(
    *,
    x_spec: tf.TensorSpec,
    num_outputs: int | None,
    size: str = "tiny",
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    dropout: float = 0.0,
    context: int | None = None,
    vocabulary: int | None = None,
    tied: bool = True,
    experts: int = 0,
    experts_per_token: int | None = None,
    capacity: float | None = None,
    balance: float | None = None,
) -> keras.Model:
    """Tokens int [B, T] -> logits [B, T, vocabulary] float32; position t sees tokens 0..t.

    Pre-norm blocks, learned positions, LayerNorm epsilon 1e-5, GELU in its tanh form, the head tied to the token
    embedding. Weights start normal(0.02), and at 0.02 / sqrt(2 * layers) where a branch joins the residual sum.
    layers, width, heads: replace the values of `size`. context: number of positions with an embedding, by default T.
    vocabulary: by default num_outputs; a larger one, for example the next multiple of 64, adds tokens that never occur.
    dropout: of the embeddings, the attention weights and both branches.
    tied: whether the head is the transpose of the token embedding, or else a separate matrix.
    experts: number of experts in place of each block's MLP; each token goes to experts_per_token of them (by default
    2). capacity: ratio of the experts' places to the places that tokens need (1.25); balance: weight of the loss that
    spreads tokens (0.01). See experts.py.

    Parameters: (vocabulary + context + 2) * D + layers * (12 * D^2 + 13 * D), and vocabulary * D more if not tied. With
    vocabulary 50257 and context 1024, gpt2 has 124,439,808 and gpt2-medium 354,823,168; small has 10,795,008 with 256
    and 128. With experts, the 8 * D^2 + 5 * D of each MLP become experts * (8 * D^2 + 6 * D). The layers besides the
    blocks' (blocks.py) are embed_tokens (the head too), embed_positions and final_norm.

    Raises ConfigError for an option out of range, or x that is not a sequence of tokens of known length.
    """
    shape = choose_options("transformer", TRANSFORMERS, size, layers=layers, width=width, heads=heads, dropout=dropout)
    shape = dataclasses.replace(
        shape,
        experts=choose_experts(
            "transformer", experts=experts, experts_per_token=experts_per_token, capacity=capacity, balance=balance
        ),
    )
    length = _length(x_spec)
    context = length if context is None else context
    if context < length:
        raise ConfigError(
            f"--model=transformer got context={context}, shorter than the sequences of {length} tokens: raise it, or"
            " lower --sequence_length."
        )
    tokens = outputs("transformer", num_outputs or vocabulary)
    vocabulary = tokens if vocabulary is None else vocabulary
    if vocabulary < tokens:
        raise ConfigError(
            f"--model=transformer got vocabulary={vocabulary}, but the source has {tokens} tokens: raise it, or drop"
            " it."
        )
    return _build(shape, length, context, vocabulary, tied, x_spec.dtype.name)


def _length(x_spec: tf.TensorSpec) -> int:
    if x_spec.shape.rank != 1 or not x_spec.shape.is_fully_defined() or not x_spec.dtype.is_integer:
        raise ConfigError(
            f"--model=transformer takes integer tokens [length], but a sample's x is {x_spec.dtype.name}"
            f" {x_spec.shape}: use another --model or --source."
        )
    (length,) = known_dims(x_spec.shape)
    return length


def _build(shape: StackOptions, length: int, context: int, vocabulary: int, tied: bool, dtype: str) -> keras.Model:
    tokens_BT: Any = keras.Input((length,), dtype=dtype, name="tokens")
    # Without reverse_dtype, Keras would compute the head, a third of gpt2's work, in float32 under every policy.
    embed_tokens = layers.ReversibleEmbedding(
        vocabulary,
        shape.width,
        tie_weights=tied,
        embeddings_initializer=normal(),
        reverse_dtype=keras.config.dtype_policy().compute_dtype,
        name="embed_tokens",
    )
    embed_positions = layers.Embedding(context, shape.width, embeddings_initializer=normal(), name="embed_positions")
    x_BTD = embed_tokens(tokens_BT) + embed_positions(positions(tokens_BT))
    x_BTD = drop(x_BTD, shape.dropout, "embed_dropout")
    for index in range(shape.layers):
        x_BTD = block(x_BTD, index, shape, causal=True)
    x_BTD = layers.LayerNormalization(epsilon=EPSILON, name="final_norm")(x_BTD)
    return keras.Model(tokens_BT, float32_logits(embed_tokens(x_BTD, reverse=True)), name="transformer")
