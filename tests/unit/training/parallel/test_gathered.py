"""Layers that gather their variables (--zero=3) against the same layers with whole variables: outputs and gradients."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfdist.config import Config
from tfdist.config.mesh_degrees import AXES
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError
from tfdist.runtime.mesh_runtime import MeshRuntime
from tfdist.training.parallel.gathered import gather_layers
from tfdist.training.parallel.shards import shard_variables
from tfdist.training.row_checks.reductions import SUM
from tfdist.training.row_checks.sums_as_means import AddedLoss, SumsAsMeans


class Scaled(layers.Layer):
    """Scales its input, and calls a layer that it holds."""

    def __init__(self, inner, **options):
        super().__init__(**options)
        self.inner, self.supports_masking = inner, True

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")
        if not self.inner.built:
            self.inner.build(shape)

    def compute_mask(self, x, mask=None):
        return None

    def call(self, x):
        return self.inner(self.scale * x)


class ScaledAfterwards(Scaled):
    """Its inner layer takes the mask that the input carries, and gives its result one."""

    def call(self, x):
        return self.inner(x) * self.scale


class Around(layers.Layer):
    """Returns what its inner layer returns, with the mask that this carries."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.supports_masking = inner, True

    def build(self, shape):
        self.bias = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return self.inner(x + self.bias)


class Attends(Scaled):
    """Its inner layer takes the mask away from its argument, in plain Keras."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")
        self.inner.build(shape, shape)

    def call(self, x):
        return self.scale * self.inner(x, x)


class Entropy(layers.Layer):
    """Takes probabilities, whose logits Keras knows; returns a crossentropy for each of them, or the probabilities."""

    def __init__(self, is_passing):
        super().__init__()
        self.is_passing = is_passing

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        if self.is_passing:
            self.add_loss(2.0 * self.scale)
            return x
        return self.scale * keras.losses.sparse_categorical_crossentropy(keras.ops.argmin(x, -1), x)


class Signs(layers.Layer):
    """Keeps a tensor through which no gradient flows, and takes it in another layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Keeper(), Taker()

    def call(self, x):
        x = self.first(x)
        return self.second(x, box=Box(keras.ops.cast(self.first.kept > 0, x.dtype)))


class Steps(layers.Layer):
    """Calls a cell for each step, as a user's own RNN."""

    def __init__(self):
        super().__init__()
        self.cell = layers.LSTMCell(3, dropout=0.5, seed=1)

    def build(self, shape):
        self.cell.build((shape[0], shape[2]))

    def call(self, x, training=False):
        states = [keras.ops.zeros((3, 3)), keras.ops.zeros((3, 3))]
        for step in range(x.shape[1]):
            output, states = self.cell(x[:, step], states, training=training)
        self.cell.reset_dropout_mask()
        return output


class Waves(layers.Layer):
    """Returns complex numbers, or takes them."""

    def __init__(self, is_first):
        super().__init__(autocast=False)
        self.is_first = is_first

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        if self.is_first:
            return tf.signal.fft(tf.cast(self.scale * x, tf.complex64))
        return self.scale * tf.math.real(tf.signal.ifft(x * tf.complex(0.5, 0.2)))


class Within(layers.Layer):
    """Calls a layer in a branch."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return tf.cond(tf.reduce_sum(x) > -1e9, lambda: self.inner(x), lambda: tf.zeros_like(x))


class SumLoss(layers.Layer):
    """Adds a sum over the rows."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        self.add_loss(keras.ops.sum(keras.ops.square(self.scale * x)))
        return self.scale * x


class Louder(layers.Layer):
    def call(self, x, training=False):
        return 3.0 * x if training else x


class Masked(layers.Layer):
    """Has weights, and gives its output a mask."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def compute_mask(self, x, mask=None):
        return keras.ops.any(x > 0.3, -1)

    def call(self, x):
        return self.scale * x


class Keeper(layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), initializer="ones")

    def call(self, x):
        self.kept = keras.ops.tanh(x @ self.kernel)
        return x


@dataclasses.dataclass
class Box:
    tensor: object


class Taker(layers.Layer):
    """Takes a tensor that is no argument, or that is in an object."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x, box=None):
        return x * self.scale + box.tensor


class Boxes(layers.Layer):
    def __init__(self):
        super().__init__()
        self.dense, self.taker = layers.Dense(4), Taker()

    def call(self, x):
        return self.taker(x, box=Box(self.dense(x)))


def sequential(*parts):
    return lambda: keras.Sequential([keras.Input((5, 4)), *(part() for part in parts)])


def of_half_precision():
    inner = layers.Dense(4, dtype="float32")
    return keras.Sequential([keras.Input((5, 4)), Scaled(inner, dtype="mixed_bfloat16"), layers.Dense(2)])


def shared():
    """An inner layer that is called from outside as well."""
    inputs, inner = keras.Input((5, 4)), layers.Dense(4, "tanh")
    return keras.Model(inputs, Scaled(inner)(inner(inputs)))


MODELS = {
    "training": sequential(lambda: layers.Dense(4), lambda: Scaled(Louder()), lambda: layers.Dense(2)),
    "dropout": sequential(lambda: Scaled(layers.Dropout(0.5, seed=1)), lambda: layers.Dense(2)),
    "weights inside": sequential(lambda: Scaled(layers.Dense(4)), lambda: Scaled(layers.BatchNormalization())),
    "a model inside": sequential(
        lambda: Scaled(
            Scaled(keras.Sequential([layers.BatchNormalization(), layers.Dropout(0.5, seed=1), layers.Dense(4)]))
        )
    ),
    "twice inside": sequential(lambda: Scaled(Scaled(layers.LSTM(3, dropout=0.5, seed=1)))),
    "mask inside": sequential(
        lambda: layers.Masking(-1.0),
        lambda: ScaledAfterwards(layers.GlobalAveragePooling1D()),
        lambda: layers.Dense(2),
    ),
    "mask made inside": sequential(
        lambda: Around(layers.Masking(0.0)), layers.GlobalAveragePooling1D, lambda: layers.Dense(2)
    ),
    "mask of a result": sequential(Masked, layers.GlobalAveragePooling1D, lambda: layers.Dense(2)),
    "unrolled": sequential(lambda: layers.LSTM(3, dropout=0.5, unroll=True, seed=1)),
    "rolled": sequential(lambda: layers.Bidirectional(layers.GRU(3, dropout=0.5, seed=1))),
    "float32 in bfloat16": of_half_precision,
    "attention": sequential(
        lambda: layers.Masking(-1.0), lambda: Attends(layers.MultiHeadAttention(2, 4)), lambda: layers.Dense(2)
    ),
    "logits of an argument": sequential(lambda: layers.Dense(4, "softmax"), lambda: Entropy(False)),
    "an argument returned": sequential(layers.Flatten, lambda: layers.Dense(3, "softmax"), lambda: Entropy(True)),
    "without a gradient": sequential(Signs, lambda: layers.Dense(2)),
    "steps": sequential(Steps),
    "mask in a branch": sequential(lambda: Within(Around(layers.Masking(0.0))), lambda: layers.Dense(2)),
    "complex numbers": sequential(lambda: layers.Dense(4), lambda: Waves(True), lambda: Waves(False)),
    "an added sum": sequential(lambda: layers.Dense(4), SumLoss, lambda: layers.Dense(2)),
    "shared": shared,
    "large logits": sequential(
        layers.Flatten,
        lambda: layers.Dense(3, "softmax", kernel_initializer=keras.initializers.RandomNormal(stddev=20.0, seed=1)),
    ),
}


def squares(outputs):
    return tf.reduce_sum(tf.cast(outputs, tf.float32) ** 2)


def entropy(outputs):
    return tf.reduce_sum(keras.losses.sparse_categorical_crossentropy(tf.constant([0, 1, 2]), outputs))


def found(make, gathered, loss_of=squares):
    """(loss, gradients and what layers keep beside their weights) in training."""
    keras.utils.set_random_seed(3)
    model = make()
    x = np.random.default_rng(1).normal(size=(3, 5, 4)).astype("float32")
    x[:, 3:] = -1.0
    variables, sources = model.trainable_variables, model.trainable_variables
    sums = SumsAsMeans([AddedLoss(layer, 0, SUM) for layer in model.layers if isinstance(layer, SumLoss)])
    if gathered:
        runtime = MeshRuntime.create(Config().replace(strategy="mesh"), Cluster())
        groups = [runtime.group(*AXES)] * len(variables)
        sources = shard_variables(variables, groups)
        gather_layers(model, variables, sources, groups)

    def run():
        with sums.counting(2.0):
            with tf.GradientTape() as tape:
                loss = loss_of(model(x, training=True)) + sum(model.losses)
            values = [variable.value for variable in sources]
            return loss, tape.gradient(loss, values, unconnected_gradients=tf.UnconnectedGradients.ZERO)

    loss, gradients = tf.function(run, autograph=False)() if gathered else run()
    state = [variable.numpy() for variable in model.non_trainable_variables]
    return loss.numpy(), [*map(np.ravel, gradients), *state]


@pytest.mark.parametrize("name", MODELS)
def test_gathered_layers_compute_the_same(name):
    loss_of = entropy if name in ("large logits", "an argument returned") else squares
    (loss, gradients), (its_loss, its_gradients) = (found(MODELS[name], each, loss_of) for each in (False, True))
    np.testing.assert_allclose(its_loss, loss, rtol=1e-6)
    assert any(np.abs(gradient).max() > 0 for gradient in gradients)
    for mine, other in zip(gradients, its_gradients, strict=True):
        np.testing.assert_allclose(other, mine, rtol=1e-5, atol=1e-6)


def kept_by_a_layer():
    inputs, keeper, taker = keras.Input((5, 4)), Keeper(), Taker()

    class Around(layers.Layer):
        def __init__(self):
            super().__init__()
            self.taker = taker

        def call(self, x):
            return self.taker(x, box=Box(keeper.kept))

    return keras.Model(inputs, Around()(keeper(inputs)))


@pytest.mark.parametrize("make", [kept_by_a_layer, sequential(Boxes)])
def test_tensors_that_would_get_no_gradient_are_refused(make):
    with pytest.raises(ConfigError, match=r"takes the tensor \S+ otherwise than as an argument of its call"):
        found(make, True)
