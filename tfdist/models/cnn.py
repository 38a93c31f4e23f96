"""The cnn model: a small convolutional classifier for small images (8x8 digits, 28x28, 32x32)."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf
from keras import layers

from tfdist.control.exit_codes import ConfigError
from tfdist.models import cnn_sizes
from tfdist.models.inputs import dropout as drop
from tfdist.models.inputs import image_input, outputs, rate


def cnn(
    *,
    x_spec: tf.TensorSpec,
    num_outputs: int | None,
    widths: Sequence[int] = (32, 64),
    dropout: float = 0.0,
    norm: str = "batch",
) -> keras.Model:
    """Images [B, H, W, C] in 0..1 -> per width: 3x3 convolution, norm, ReLU, 2x2 max-pool -> logits [B, num_outputs]
    float32.

    norm: "batch", "group" (groups of 8 channels, for small batches: Wu and He 2018, arXiv:1803.08494), or "none"
    (convolutions then have a bias). `dropout` is before the last layer.
    Raises ConfigError for another norm, x that is not an image, or no number of classes.
    """
    if norm not in ("batch", "group", "none"):
        raise ConfigError(f"--model=cnn got norm={norm}: use batch, group or none.")
    rate("cnn", dropout)
    inputs = x = image_input("cnn", x_spec)
    for index, width in enumerate(widths):
        strides = cnn_sizes.first_stride(x.shape[1:3]) if index == 0 else 1
        x = layers.Conv2D(
            width,
            3,
            strides=strides,
            padding="same",
            use_bias=norm == "none",
            kernel_initializer="he_normal",
            name=f"conv_{index:02d}",
        )(x)
        if norm == "batch":
            x = layers.BatchNormalization(momentum=0.9, name=f"norm_{index:02d}")(x)
        elif norm == "group":
            x = layers.GroupNormalization(groups=max(1, width // 8), name=f"norm_{index:02d}")(x)
        x = layers.ReLU(name=f"relu_{index:02d}")(x)
        if cnn_sizes.pools(x.shape[1:3]):
            x = layers.MaxPooling2D(2, name=f"pool_{index:02d}")(x)
    flat = (
        layers.Flatten(name="flatten")
        if cnn_sizes.flattens(x.shape[1:3])
        else layers.GlobalAveragePooling2D(name="average")
    )
    x = drop(flat(x), dropout, "dropout")
    logits = layers.Dense(outputs("cnn", num_outputs), dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name="cnn")
