"""The vit model: an image classifier of transformer blocks over patches (Dosovitskiy et al. 2020, arXiv:2010.11929)."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.control.exit_codes import ConfigError
from tfdist.models.blocks import EPSILON, StackOptions, block, choose_options, normal, positions
from tfdist.models.inputs import dropout as drop
from tfdist.models.inputs import image_input, outputs
from tfdist.models.keras_untyped import layers, ops
from tfdist.models.transformer_sizes import VITS, usual_patch


def vit(
    *,
    x_spec: tf.TensorSpec,
    num_outputs: int | None,
    size: str = "tiny",
    patch: int | None = None,
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    dropout: float = 0.0,
    pool: str = "mean",
) -> keras.Model:
    """Images [B, H, W, C] in 0..1, brought to -1..1 -> patches -> blocks -> pool -> logits [B, num_outputs] float32.

    patch: the side of a patch in pixels; by default 16 from 128 pixels on, 4 from 16, else 2.
    layers, width, heads: replace the values of `size`. dropout: of the patches, the attention weights and both
    branches.
    pool: "mean" of the patches (better: Beyer et al. 2022, arXiv:2205.01580), or "class", the paper's class token.
    The blocks are those of GPT-2 (LayerNorm epsilon 1e-5, GELU in its tanh form). With 224 x 224 pixels, 1000 classes
    and a class token, small (S/16) has 22,050,664 parameters and base (B/16) 86,567,656.

    Raises ConfigError for an option out of range, a patch that does not divide the image, x that is not an image, or no
    number of classes.
    """
    if pool not in ("mean", "class"):
        raise ConfigError(f"--model=vit got pool={pool}: use mean or class.")
    shape = choose_options("vit", VITS, size, layers=layers, width=width, heads=heads, dropout=dropout)
    image = image_input("vit", x_spec)
    sides = image.shape[1:3]
    if patch is None:
        patch = usual_patch(sides)
    if not isinstance(patch, int) or patch < 1 or any(side % patch for side in sides):
        raise ConfigError(
            f"--model=vit got patch={patch}, which does not divide an image of {sides[0]} x {sides[1]}: use another"
            " --model_args=patch=..."
        )
    return _build(image, shape, patch, pool, outputs("vit", num_outputs))


def _build(image: keras.KerasTensor, shape: StackOptions, patch: int, pool: str, classes: int) -> keras.Model:
    x = layers.Rescaling(2.0, -1.0, name="from_0_to_1")(image)
    x = layers.Conv2D(shape.width, patch, strides=patch, kernel_initializer="lecun_normal", name="embed_patches")(x)
    length = x.shape[1] * x.shape[2]
    x_BTD = layers.Reshape((length, shape.width), name="patches")(x)
    if pool == "class":
        first_B1 = ops.zeros_like(x_BTD[:, :1, 0], dtype="int32")
        token_B1D = layers.Embedding(1, shape.width, embeddings_initializer=normal(), name="embed_class")(first_B1)
        x_BTD, length = ops.concatenate([token_B1D, x_BTD], axis=1), length + 1
    x_BTD = x_BTD + layers.Embedding(length, shape.width, embeddings_initializer=normal(), name="embed_positions")(
        positions(x_BTD[:, :, 0])
    )
    x_BTD = drop(x_BTD, shape.dropout, "embed_dropout")
    for index in range(shape.layers):
        x_BTD = block(x_BTD, index, shape, causal=False)
    x_BTD = layers.LayerNormalization(epsilon=EPSILON, name="final_norm")(x_BTD)
    x_BD = layers.GlobalAveragePooling1D(name="average")(x_BTD) if pool == "mean" else x_BTD[:, 0]
    return keras.Model(
        image, layers.Dense(classes, kernel_initializer=normal(), dtype="float32", name="logits")(x_BD), name="vit"
    )
