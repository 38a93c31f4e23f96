"""The pre-norm transformer block and learned positions, which transformer.py and vit.py share.

Shapes: B batch, T positions, D width, F = 4 D, H heads, K = D / H.

The layers are flat in the model, and their names are an interface (variable paths are NAME/kernel and so on):
    block_00_norm_1  block_00_attention_qkv  block_00_attention_out  block_00_attention_add
                     block_00_attention_query, _key, _value and _joined (Reshape layers: to heads, and back)
    block_00_norm_2  block_00_mlp_up         block_00_mlp_down       block_00_mlp_add
                     or, instead of _mlp_up and _mlp_down, the router and the experts of experts.py
The only input of a block is the output of the previous block, so the model can be cut between blocks:
`keras.Model(model.get_layer("block_02_mlp_add").output, model.get_layer("block_05_mlp_add").output)` is blocks 3 to 5,
with the same variables.

Why attention is written in this way, in milliseconds for forward and backward of the small transformer (10.8M
parameters, 8 x 128 tokens, float32, one core of a Zen 4 at 110 GFLOP/s, where the matrix products alone take 650;
TensorFlow 2.21):
    slices of a [B, T, 3, H, K] projection   810    their gradients write zeros, and the transpose has 5 dims
    keras.layers.MultiHeadAttention          735
    split + ops.dot_product_attention        730    makes its own mask [B, H, T, T]
    split + matmul, mask [1, T, T]           717    this file; adding -1e9 instead of `where` is equally fast
    the same with jit_compile                730    XLA gains nothing on a CPU, and compiles for 4 s
    ReLU for GELU, no LayerNorm              -50    the most that faster versions of these could gain; x * sigmoid(...)
                                                    for GELU and tokens as [B * T, D] gained nothing
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import keras
from keras import initializers

from tfdist.control.exit_codes import ConfigError
from tfdist.models import fused_attention
from tfdist.models.experts import Experts, mixture
from tfdist.models.inputs import dropout, rate
from tfdist.models.keras_untyped import layers, ops
from tfdist.models.transformer_sizes import Size

EPSILON = 1e-5
_STDDEV = 0.02
_MASKED = -1e9


@dataclass(frozen=True)
class StackOptions:
    """The options of a stack of blocks."""

    layers: int
    width: int
    heads: int
    dropout: float = 0.0
    experts: Experts | None = None  # in place of each block's MLP


def choose_options(
    model: str,
    sizes: Mapping[str, Size],
    size: str,
    *,
    layers: int | None,
    width: int | None,
    heads: int | None,
    dropout: float,
) -> StackOptions:
    """Returns the options of the named size; arguments that are not None replace its values.

    Raises ConfigError for an unknown size, or a width that the number of heads does not divide.
    """
    if size not in sizes:
        raise ConfigError(f"--model={model} got size={size}: use {', '.join(sizes)}.")
    chosen = sizes[size].with_own(layers, width, heads)._asdict()
    for key, value in chosen.items():
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"--model={model} got {key}={value}: it must be a whole number, at least 1.")
    if chosen["width"] % chosen["heads"]:
        raise ConfigError(
            f"--model={model} got width={chosen['width']} and heads={chosen['heads']}: heads must divide the width."
        )
    return StackOptions(**chosen, dropout=rate(model, dropout))


def normal() -> initializers.Initializer:
    """Returns GPT-2's initializer: normal, standard deviation 0.02.

    Make a new one for each layer, or all layers would start with equal weights.
    """
    return initializers.RandomNormal(stddev=_STDDEV)


def positions(x_BT: keras.KerasTensor) -> keras.KerasTensor:
    """int32 [1, T]: 0, 1, ..., T - 1.

    Made from the input, because Keras cannot save a model that holds a constant tensor.
    """
    one_row = ops.sum(ops.zeros_like(x_BT, dtype="int32"), axis=0, keepdims=True) + 1
    return ops.cumsum(one_row, axis=1) - 1


def _causal_mask(x_BT: keras.KerasTensor) -> keras.KerasTensor:
    """bool [1, T, T]: True where the query's position (dim 1) may see the key's (dim 2)."""
    positions_1T = positions(x_BT)
    return ops.expand_dims(positions_1T, 2) >= ops.expand_dims(positions_1T, 1)


def block(x_BTD: keras.KerasTensor, index: int, shape: StackOptions, causal: bool) -> keras.KerasTensor:
    """x + attention(norm(x)), then x + mlp(norm(x)): the block of GPT-2 (Radford et al. 2019). [B, T, D] -> [B, T, D].

    causal: position t sees 0..t, otherwise every position sees all. The last layer of each branch starts with weights
    of standard deviation 0.02 / sqrt(2 * layers), so that the sum over the branches does not grow with depth.
    """
    name = f"block_{index:02d}"
    residual = initializers.RandomNormal(stddev=_STDDEV / (2 * shape.layers) ** 0.5)

    h_BTD = layers.LayerNormalization(epsilon=EPSILON, name=f"{name}_norm_1")(x_BTD)
    h_BTD = _attention(h_BTD, name, shape, causal, residual.clone())
    x_BTD = layers.Add(name=f"{name}_attention_add")(
        [x_BTD, dropout(h_BTD, shape.dropout, f"{name}_attention_dropout")]
    )

    h_BTD = layers.LayerNormalization(epsilon=EPSILON, name=f"{name}_norm_2")(x_BTD)
    if shape.experts:
        h_BTD = mixture(h_BTD, name, shape.experts, normal(), residual.clone())
    else:
        h_BTF = layers.Dense(4 * shape.width, kernel_initializer=normal(), name=f"{name}_mlp_up")(h_BTD)
        h_BTF = ops.gelu(h_BTF, approximate=True)
        h_BTD = layers.Dense(shape.width, kernel_initializer=residual.clone(), name=f"{name}_mlp_down")(h_BTF)
    return layers.Add(name=f"{name}_mlp_add")([x_BTD, dropout(h_BTD, shape.dropout, f"{name}_mlp_dropout")])


def _attention(
    x_BTD: keras.KerasTensor, name: str, shape: StackOptions, causal: bool, residual: initializers.Initializer
) -> keras.KerasTensor:
    """Multi-head softmax attention with one projection for queries, keys and values. The softmax is in float32."""
    length, per_head = x_BTD.shape[1], shape.width // shape.heads

    def by_head(x: keras.KerasTensor, which: str) -> keras.KerasTensor:
        return layers.Reshape((length, shape.heads, per_head), name=f"{name}_attention_{which}")(x)

    def joined(y_BTHK: keras.KerasTensor) -> keras.KerasTensor:
        y_BTD = layers.Reshape((length, shape.width), name=f"{name}_attention_joined")(y_BTHK)
        return layers.Dense(shape.width, kernel_initializer=residual, name=f"{name}_attention_out")(y_BTD)

    qkv = layers.Dense(3 * shape.width, kernel_initializer=normal(), name=f"{name}_attention_qkv")(x_BTD)
    q_BTHK, k_BTHK, v_BTHK = (
        by_head(part, which) for part, which in zip(ops.split(qkv, 3, axis=-1), ("query", "key", "value"), strict=True)
    )
    if fused_attention.is_one_operation(shape.dropout):
        return joined(ops.dot_product_attention(q_BTHK, k_BTHK, v_BTHK, is_causal=causal))
    q_BHTK, k_BHTK, v_BHTK = (ops.transpose(x, (0, 2, 1, 3)) for x in (q_BTHK, k_BTHK, v_BTHK))
    scores_BHTT = ops.matmul(q_BHTK * per_head**-0.5, ops.transpose(k_BHTK, (0, 1, 3, 2)))
    scores_BHTT = ops.cast(scores_BHTT, "float32")
    if causal:
        scores_BHTT = ops.where(_causal_mask(qkv[:, :, 0]), scores_BHTT, _MASKED)
    weights_BHTT = ops.cast(ops.softmax(scores_BHTT), v_BHTK.dtype)
    weights_BHTT = dropout(weights_BHTT, shape.dropout, f"{name}_attention_weights_dropout")
    return joined(ops.transpose(ops.matmul(weights_BHTT, v_BHTK), (0, 2, 1, 3)))
