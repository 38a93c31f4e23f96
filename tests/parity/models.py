"""Models of the parity tests, given to tfdist as `tests.parity.models:NAME`.

There is no bias in front of a BatchNormalization: its exact gradient is 0, the computed one is rounding noise, and Adam
turns noise of any size into steps of full size. That would hide real differences behind a large bound.
"""

from __future__ import annotations

import keras
import numpy as np
from sklearn.datasets import load_digits

from tfdist.models.transformer import transformer


def conv_bn(num_outputs: int, dropout: float = 0.0) -> keras.Model:
    """Convolutions with synchronised BatchNormalization."""
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.Conv2D(16, 3, strides=2, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.Flatten(),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(num_outputs, kernel_regularizer=keras.regularizers.L2(1e-3), dtype="float32"),
        ]
    )


def dense(num_outputs: int) -> keras.Model:
    """Two dense layers: no state, no noise."""
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(32, activation="tanh"),
            keras.layers.Dense(num_outputs, dtype="float32"),
        ]
    )


class Noise(keras.layers.Layer):
    """Draws without a generator of its own, in training."""

    def call(self, x, training=False):
        return x + 0.3 * keras.random.normal(keras.ops.shape(x)) if training else x


def noisy(num_outputs: int) -> keras.Model:
    """`dense`, with noise that is drawn from Keras' global generator, and by a layer that has one."""
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(32, activation="tanh"),
            Noise(),
            keras.layers.Dropout(0.2),
            Noise(),
            keras.layers.Dense(num_outputs, dtype="float32"),
        ]
    )


class Buckets(keras.layers.Layer):
    """[n, k] numbers -> int32 [n, k] rows of a table with `COUNT` rows for each of the k places."""

    COUNT = 64

    def call(self, x):
        buckets = keras.ops.clip(keras.ops.floor(8 * x) + self.COUNT // 2, 0, self.COUNT - 1)
        return keras.ops.cast(buckets, "int32") + self.COUNT * keras.ops.arange(x.shape[1], dtype="int32")


def table(num_outputs: int) -> keras.Model:
    """A table of 4096 rows, of which a sample looks up 64, some of them together with other samples."""
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Flatten(),
            Buckets(),
            keras.layers.Embedding(64 * Buckets.COUNT, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(num_outputs, dtype="float32"),
        ]
    )


class Adds(keras.layers.Layer):
    """Scales rows by a weight, and adds a mean and a sum over the scaled rows to the loss."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        each = keras.ops.mean(keras.ops.square(self.scale * x), -1)
        self.add_loss(0.02 * keras.ops.mean(each))
        self.add_loss(0.002 * keras.ops.sum(each))
        return self.scale * x


def adds(num_outputs: int) -> keras.Model:
    """Losses that layers add, around a synchronised BatchNormalization."""
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(
                24,
                use_bias=False,
                activity_regularizer=keras.regularizers.L2(1e-3),
                kernel_regularizer=keras.regularizers.L2(1e-3),
            ),
            keras.layers.BatchNormalization(),
            Adds(),
            keras.layers.Dense(16, activation="tanh", activity_regularizer=keras.regularizers.L1(1e-3)),
            keras.layers.Dense(num_outputs, dtype="float32"),
        ]
    )


def weighted_digits(split: str):
    """Digits with weights from 0 to 3; one training sample is NaN."""
    digits = load_digits()
    x, y = (digits.images[..., None] / 16).astype("float32"), digits.target.astype("int32")
    w = np.random.default_rng(5).choice([0.0, 0.3, 1.0, 3.0], len(y)).astype("float32")
    if split == "train":
        x[70], w[70] = np.nan, 1.0
    return (x[:1200], y[:1200], w[:1200]) if split == "train" else (x[1200:], y[1200:], w[1200:])


class Unmasked(keras.layers.Flatten):
    """Flatten that drops the mask without a warning."""

    def __init__(self):
        super().__init__()
        self.supports_masking = True

    def compute_mask(self, inputs, mask=None):
        return None


def masked(num_outputs: int) -> keras.Model:
    """Pixels as words. Some are masked, in some samples all; BatchNormalization takes the others."""
    return keras.Sequential(
        [
            keras.layers.Input((32,), dtype="int32"),
            keras.layers.Embedding(16, 6, mask_zero=True),
            keras.layers.BatchNormalization(),
            Unmasked(),
            keras.layers.Dense(num_outputs, dtype="float32"),
        ]
    )


def masked_digits(split: str):
    """The pixels of the middle rows of digits, 0 (which is masked) to 15."""
    digits = load_digits()
    x, y = np.minimum(digits.images[:, 2:6].reshape(-1, 32), 15).astype("int32"), digits.target.astype("int32")
    x[::40] = 0
    return (x[:1200], y[:1200]) if split == "train" else (x[1200:], y[1200:])


def offset(num_outputs: int) -> keras.Model:
    """BatchNormalization of numbers of about 2000 that differ by about 1."""
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(24, use_bias=False),
            keras.layers.Rescaling(1.0, offset=2000.0),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dense(num_outputs, dtype="float32"),
        ]
    )


class Subclassed(keras.Model):
    """Has no graph of layers: its output shape is not known before it is called."""

    def __init__(self, num_outputs: int):
        super().__init__()
        self.flatten = keras.layers.Flatten()
        self.hidden = keras.layers.Dense(32, activation="tanh")
        self.norm = keras.layers.BatchNormalization(momentum=0.5)
        self.outputs_layer = keras.layers.Dense(num_outputs, dtype="float32")

    def call(self, x, training=None):
        return self.outputs_layer(self.norm(self.hidden(self.flatten(x)), training=training))


def subclassed(num_outputs: int) -> keras.Model:
    model = Subclassed(num_outputs)
    model(np.zeros((1, 8, 8, 1), "float32"))
    return model


class Spare(keras.layers.Dense):
    """Has one trainable weight that it does not use."""

    def build(self, input_shape):
        super().build(input_shape)
        self.spare = self.add_weight(name="spare", shape=(3, 4), initializer="ones")


class Stop(keras.layers.Layer):
    """Stops gradients: nothing before it learns."""

    def call(self, x):
        return keras.ops.stop_gradient(x)


def idle(num_outputs: int) -> keras.Model:
    """Blocks as below, with variables on which the loss does not depend: before a layer that stops gradients, and in a
    layer that uses another variable."""
    inputs = keras.Input((8, 8, 1))
    x = Stop()(keras.layers.Dense(16, name="start")(keras.layers.Flatten()(inputs)))
    for index in range(2):
        name = f"block_{index:02d}"
        y = keras.layers.LayerNormalization(name=f"{name}_norm_1")(x)
        y = Spare(32, activation="tanh", name=f"{name}_mlp_up")(y)
        x = keras.layers.Add(name=f"{name}_mlp_add")([x, keras.layers.Dense(16, name=f"{name}_mlp_down")(y)])
    return keras.Model(inputs, keras.layers.Dense(num_outputs, dtype="float32", name="outputs")(x))


def towers(num_outputs: int) -> keras.Model:
    """Two towers that one function makes: their variables have the same paths."""

    def tower(side: str) -> keras.Model:
        inputs = keras.Input((64,))
        x = keras.layers.Dense(8, activation="tanh", name="hidden")(inputs)
        return keras.Model(inputs, keras.layers.Dense(4, activation="tanh", name="out")(x), name=side)

    inputs = keras.Input((8, 8, 1))
    x = keras.layers.Flatten()(inputs)
    x = keras.layers.Concatenate()([tower("left")(x), tower("right")(x)])
    return keras.Model(inputs, keras.layers.Dense(num_outputs, dtype="float32", name="outputs")(x))


def frozen(num_outputs: int) -> keras.Model:
    """Two blocks, and nothing to train in the first one nor before it: the first of two stages has no gradients."""
    inputs = keras.Input((8, 8, 1))
    x = keras.layers.Dense(16, trainable=False, name="start")(keras.layers.Flatten()(inputs))
    for index in range(2):
        name, trains = f"block_{index:02d}", index == 1
        y = keras.layers.LayerNormalization(trainable=trains, name=f"{name}_norm_1")(x)
        y = keras.layers.Dense(16, activation="tanh", trainable=trains, name=f"{name}_mlp_down")(y)
        x = keras.layers.Add(name=f"{name}_mlp_add")([x, y])
    return keras.Model(inputs, keras.layers.Dense(num_outputs, dtype="float32", name="outputs")(x))


class Penalty(keras.layers.Layer):
    """Passes on what it gets, and adds a loss of its own: a mean over samples."""

    def call(self, x):
        self.add_loss(0.05 * keras.ops.mean(keras.ops.square(x)))
        return x


def blocks(num_outputs: int) -> keras.Model:
    """Three blocks that can be cut, recomputed and distributed over `model`. Each has losses of every kind: added ones,
    regularizers of activities and of weights; one of them belongs to a layer that the first and the last block share.
    """
    regularizer = keras.regularizers.L2
    shared = keras.layers.Dense(16, kernel_regularizer=regularizer(1e-2), name="shared")
    inputs = keras.Input((8, 8, 1))
    x = keras.layers.Dense(16, kernel_regularizer=regularizer(1e-2), name="start")(keras.layers.Flatten()(inputs))
    for index in range(3):
        name = f"block_{index:02d}"
        y = keras.layers.LayerNormalization(name=f"{name}_norm_1")(x)
        y = keras.layers.Dense(32, activation="tanh", name=f"{name}_mlp_up")(shared(y) if index != 1 else y)
        y = keras.layers.Dense(16, activity_regularizer=regularizer(1e-2), name=f"{name}_mlp_down")(y)
        x = keras.layers.Add(name=f"{name}_mlp_add")([x, Penalty(name=f"{name}_penalty")(y)])
    outputs = keras.layers.Dense(num_outputs, kernel_regularizer=regularizer(1e-2), dtype="float32", name="outputs")(x)
    return keras.Model(inputs, outputs)


def gated(num_outputs: int) -> keras.Model:
    """A block with the names that are cut over `model`, but half of the output of `mlp_up` gates the other half."""
    inputs = keras.Input((8, 8, 1))
    x = keras.layers.Dense(16, name="start")(keras.layers.Flatten()(inputs))
    up, gate = keras.ops.split(keras.layers.Dense(64, name="block_00_mlp_up")(x), 2, -1)
    x = x + keras.layers.Dense(16, name="block_00_mlp_down")(up * keras.ops.sigmoid(gate))
    return keras.Model(inputs, keras.layers.Dense(num_outputs, dtype="float32", name="outputs")(x))


def around(x_spec, num_outputs: int, kind: str) -> keras.Model:
    """A model around the transformer: with scaled logits and frozen layers, with another head, or normed logits."""
    inner = transformer(x_spec=x_spec, num_outputs=num_outputs, layers=1, width=32, heads=4)
    if kind == "scaled":
        for name in ("embed_tokens", "block_00_mlp_up"):
            inner.get_layer(name).trainable = False
        tokens = keras.Input(x_spec.shape, dtype=x_spec.dtype.name)
        return keras.Model(tokens, keras.layers.Rescaling(2.0)(inner(tokens)))
    if kind == "head":
        head = keras.layers.Dense(num_outputs, dtype="float32", name="head")
        return keras.Model(inner.input, head(inner.get_layer("final_norm").output))
    return keras.Model(inner.input, keras.ops.log_softmax(inner.output))
