"""The vit model: an image classifier of transformer blocks over patches (Dosovitskiy et al. 2020, arXiv:2010.11929)."""

from __future__ import annotations

import keras
import tensorflow as tf
from keras import layers

from tfdist.control.exit_codes import ConfigError
from tfdist.models.blocks import EPSILON, Shape, block, choose_shape, normal, positions
from tfdist.models.inputs import dropout as drop
from tfdist.models.inputs import image_input, outputs

SIZES = {  # the names and sizes of Touvron et al. 2020, arXiv:2012.12877
    "tiny": Shape(layers=12, width=192, heads=3),
    "small": Shape(layers=12, width=384, heads=6),
    "base": Shape(layers=12, width=768, heads=12),
}


def vit(*, x_spec: tf.TensorSpec, num_outputs: int | None, size: str = "tiny", patch: int | None = None, layers: int | None = None,
        width: int | None = None, heads: int | None = None, dropout: float = 0.0) -> keras.Model:
    """Images [B, H, W, C] in 0..1, brought to -1..1 -> patches -> blocks -> mean over patches -> logits [B, num_outputs] float32.

    patch: the side of a patch in pixels; by default 16 from 128 pixels on, 4 from 16, else 2.
    layers, width, heads: instead of those of `size`. dropout: of the patches, the attention weights and both branches.
    Two differences from the paper: the mean of the patches instead of a class token (Beyer et al. 2022,
    arXiv:2205.01580), and the blocks of GPT-2 (LayerNorm epsilon 1e-5, GELU in its tanh form).

    Raises ConfigError for an option out of range, a patch that does not divide the image, x that is no image, or no
    number of classes.
    """
    shape = choose_shape("vit", SIZES, size, layers=layers, width=width, heads=heads, dropout=dropout)
    image = image_input("vit", x_spec)
    sides = image.shape[1:3]
    if patch is None:
        patch = 16 if min(sides) >= 128 else 4 if min(sides) >= 16 else 2
    if not isinstance(patch, int) or patch < 1 or any(side % patch for side in sides):
        raise ConfigError(f"--model=vit got patch={patch}, which does not divide an image of {sides[0]} x {sides[1]}: use another --model_args=patch=...")
    return _build(image, shape, patch, outputs("vit", num_outputs))


def _build(image: keras.KerasTensor, shape: Shape, patch: int, classes: int) -> keras.Model:
    x = layers.Rescaling(2.0, -1.0, name="from_0_to_1")(image)
    x = layers.Conv2D(shape.width, patch, strides=patch, kernel_initializer="lecun_normal", name="embed_patches")(x)
    length = x.shape[1] * x.shape[2]
    x_BTD = layers.Reshape((length, shape.width), name="patches")(x)
    x_BTD = x_BTD + layers.Embedding(length, shape.width, embeddings_initializer=normal(), name="embed_positions")(positions(x_BTD[:, :, 0]))
    x_BTD = drop(x_BTD, shape.dropout, "embed_dropout")
    for index in range(shape.layers):
        x_BTD = block(x_BTD, index, shape)
    x_BTD = layers.LayerNormalization(epsilon=EPSILON, name="final_norm")(x_BTD)
    x_BD = layers.GlobalAveragePooling1D(name="average")(x_BTD)
    return keras.Model(image, layers.Dense(classes, kernel_initializer=normal(), dtype="float32", name="logits")(x_BD), name="vit")
