"""Layers of the fuzzer's models that Keras does not ship: they add losses, keep state or use constants."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import ops


class MeanLoss(keras.layers.Layer):
    """Adds the mean over rows of x^2 to the loss."""

    def __init__(self, rate: float = 0.3, **options):
        super().__init__(**options)
        self.rate, self.supports_masking = rate, True

    def call(self, x):
        self.add_loss(self.rate * ops.mean(ops.square(x)))
        return x


class SumLoss(MeanLoss):
    """Adds the sum over rows of x^2 to the loss."""

    def call(self, x):
        self.add_loss(self.rate * ops.sum(ops.square(x)))
        return x


class RowsLoss(SumLoss):
    """Adds one value for each row to the loss; Keras takes their sum."""

    def call(self, x):
        self.add_loss(self.rate * ops.sum(ops.square(x), axis=tuple(range(1, len(x.shape)))))
        return x


class KeptLoss(MeanLoss):
    """Keeps what it computes in lists and dicts, as the sampling layer of a VAE does, and adds a loss of these."""

    def call(self, x):
        mean, log_variance = 0.9 * x, ops.tanh(x)
        self.kept = {"parts": [mean, log_variance]}
        self.add_loss(self.divergence())
        return mean + 0.1 * log_variance

    def divergence(self):
        """Returns the mean over rows of the Kullback-Leibler divergence from the standard normal distribution."""
        mean, log_variance = self.kept["parts"]
        each = 0.5 * (ops.square(mean) + ops.exp(log_variance) - 1.0 - log_variance)
        return self.rate * ops.mean(each)


class SumInEvaluation(MeanLoss):
    """Adds the mean over rows of x^2 in training, and their sum in evaluation."""

    def call(self, x, training=False):
        self.add_loss(self.rate * (ops.mean(ops.square(x)) if training else ops.sum(ops.square(x))))
        return x


class MaxLoss(MeanLoss):
    """Adds the largest x^2 to the loss, which is neither a mean nor a sum over rows."""

    def call(self, x):
        self.add_loss(self.rate * ops.max(ops.square(x)))
        return x


class FirstLoss(MeanLoss):
    """Adds the mean of x^2 over the first five rows, which are all rows of a small batch."""

    def call(self, x):
        self.add_loss(self.rate * ops.mean(ops.square(x[:5])))
        return x


class HiddenLoss(MeanLoss):
    """Adds the mean of x^2 to the loss, and to the gradient also that of a variance over all rows."""

    def call(self, x):
        hidden = ops.mean(ops.var(x, axis=0))
        self.add_loss(self.rate * (ops.mean(ops.square(x)) + hidden - ops.stop_gradient(hidden)))
        return x


class FlooredLoss(MeanLoss):
    """Adds the mean of x^2, but at least a limit. The mean exceeds it on some batches only, or on parts of them."""

    def call(self, x):
        self.add_loss(self.rate * ops.maximum(ops.mean(ops.square(x)), 0.25))
        return x


class InnerMetric(keras.layers.Layer):
    """Updates a metric in its call, with a value for each row."""

    def __init__(self, **options):
        super().__init__(**options)
        self.mean = keras.metrics.Mean(name=f"{self.name}_mean")
        self.supports_masking = True

    def call(self, x):
        rows = ops.mean(ops.square(ops.cast(x, self.mean.dtype)), axis=tuple(range(1, len(x.shape))))
        self.mean.update_state(rows)
        return x


class Counter(keras.layers.Layer):
    """Keeps state that is the same on all workers: how often the layer was called in training."""

    supports_masking = True

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1.0)
        return x


class LongCounter(keras.layers.Layer):
    """Counts in whole numbers above 2^24 and has a table of such numbers; both change its output."""

    supports_masking = True

    def build(self, shape):
        def whole(value):
            return lambda shape, dtype=None: ops.full(shape, value, dtype=dtype)

        self.calls = self.add_weight(shape=(), dtype="int64", initializer=whole(2**24), trainable=False, name="calls")
        self.ids = self.add_weight(shape=(2,), dtype="int64", initializer=whole(2**40 + 1), trainable=False, name="ids")

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1)
        turn = ops.cast(self.calls % 3 + ops.sum(self.ids % 2), x.dtype)
        return x * (1 + 0.1 * turn)


class FarApart(keras.initializers.Initializer):
    """Three logits so far apart that the softmax of the smallest is about 1e-9."""

    def __call__(self, shape, dtype=None):
        return ops.convert_to_tensor([0.0, 10.0, -10.0], dtype=dtype)

    def get_config(self):
        return {}


class Grows(keras.constraints.Constraint):
    """Clips weights at a limit that grows with each update: state outside the layers, unknown to Keras."""

    def __init__(self):
        self.updates = tf.Variable(0.0, trainable=False)

    def __call__(self, weight):
        limit = ops.cast(0.2 + 0.02 * self.updates.assign_add(1.0), weight.dtype)
        return ops.clip(weight, -limit, limit)

    def get_config(self):
        return {}


class Keeps(keras.layers.Layer):
    """Keeps state that is unknown to Keras and the same on all workers: a count that changes the output, and a
    generator whose numbers have no effect.
    """

    supports_masking = True

    def __init__(self, **options):
        super().__init__(**options)
        self.calls = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.inside = [{"generator": tf.random.Generator.from_seed(3)}]

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1)
        drawn = self.inside[0]["generator"].normal(tf.shape(x))
        return x * (1 + 0.1 * ops.cast(self.calls % 4, x.dtype)) + ops.cast(0.0 * drawn, x.dtype)


class CountingRate(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that depends on a counter of its own, unknown to the optimizer."""

    def __init__(self, rate: float):
        self.rate = rate
        self.calls = tf.Variable(0, dtype=tf.int64, trainable=False)

    def __call__(self, step):
        calls = ops.cast(self.calls.assign_add(1) % 4, keras.config.floatx())
        return ops.cast(self.rate, keras.config.floatx()) / (1 + 0.5 * calls)


class Louder(keras.layers.Layer):
    """Computes something else in training than in inference."""

    supports_masking = True

    def call(self, x, training=False):
        return 1.25 * x if training else x


class Draws(keras.layers.Layer):
    """Draws random numbers without a generator; they have no effect on the output."""

    supports_masking = True

    def call(self, x):
        drawn = ops.cast(keras.random.normal(ops.shape(x)), "float32") + tf.random.normal(tf.shape(x))
        return x + ops.cast(0.0 * drawn, x.dtype)


class Around(keras.layers.Layer):
    """Calls a layer and leaves it to Keras to pass on `training`."""

    def __init__(self, inner: keras.layers.Layer, **options):
        super().__init__(**options)
        self.inner, self.supports_masking = inner, True

    def call(self, x):
        return self.inner(x)


class Resting(Around):
    """Calls a layer with training=False, among layers that train."""

    def call(self, x):
        return self.inner(x, training=False)


class Scaled(Around):
    """Has a weight of its own, and calls a layer with weights and one that computes something else in training."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
        self.dense = keras.layers.Dense(shape[-1], name="dense")
        self.dense.build(shape)

    def call(self, x):
        return x + ops.tanh(self.inner(self.dense(self.scale * x)))


class Idle(keras.layers.Layer):
    """Has a weight that nothing depends on, which is neither trained nor decayed."""

    supports_masking = True

    def __init__(self, width: int, **options):
        super().__init__(**options)
        self.width = width

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.width), name="kernel")
        self.unused = self.add_weight(shape=(3,), initializer="ones", name="unused")

    def call(self, x):
        return ops.tanh(ops.matmul(x, self.kernel))


class InFunction(Idle):
    """Its `call` is a tf.function; the trace that a trial leaves in it must not be used by another trace."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.width), name="kernel")

    @tf.function
    def call(self, x, training=False):
        return (1.25 if training else 1.0) * ops.tanh(ops.matmul(x, self.kernel))


class HoldsFunction(InFunction):
    """Calls a tf.function that contains an `if` on a tensor."""

    def __init__(self, width: int, **options):
        super().__init__(width, **options)
        self.times = tf.function(self._times)

    def _times(self, x):
        if tf.shape(x)[0] > 10**6:
            x = -x
        return ops.matmul(x, self.kernel)

    def call(self, x, training=False):
        return (1.25 if training else 1.0) * ops.tanh(self.times(x))


class Between(keras.layers.Layer):
    """Stands between two layers that may be cut. Draws a number for each row, which has no effect. In training its
    output for a channel depends on this channel alone or, if it `mixes`, on all of them.
    """

    def __init__(self, mixes: bool, **options):
        super().__init__(**options)
        self.mixes, self.supports_masking = mixes, True
        self.seed = keras.random.SeedGenerator(3)

    def call(self, x, training=False):
        if not training:
            return x
        drawn = keras.random.uniform((ops.shape(x)[0], *(1 for _ in x.shape[1:])), seed=self.seed)
        x = x * ops.cast(drawn < 2, x.dtype)
        return x - 0.5 * ops.mean(x, -1, keepdims=True) if self.mixes else 1.25 * x


class Withheld(keras.Model):
    """A model with its own `call`, which does not pass `training` to its layers: they compute as in evaluation."""

    def call(self, inputs, training=False, mask=None):
        return super().call(inputs, mask=mask)


class RunningMean(keras.layers.Layer):
    """Keeps state that depends on the rows which a worker sees."""

    supports_masking = True

    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="mean")

    def call(self, x, training=False):
        if training:
            mean = ops.mean(x, axis=tuple(range(len(x.shape) - 1)))
            self.mean.assign(0.8 * self.mean + 0.2 * ops.cast(mean, self.mean.dtype))
        return x


def centered(x: keras.KerasTensor, width: int, name: str) -> keras.KerasTensor:
    """Makes rows depend on each other, in one of the ways in which a model can hide that. `width` and `name` select it:
    the mean over rows is subtracted, or rows are scaled by their number, or the gradient is changed, by subtracting its
    mean over rows or by clipping it to a small norm.
    """

    def less_the_mean(v: Any) -> Any:
        return v - ops.mean(v, axis=0, keepdims=True)

    def by_their_number(v: Any) -> Any:
        return v * (1 + 2 / ops.cast(ops.shape(v)[0], v.dtype))

    @tf.custom_gradient
    def on_the_way_back(v: Any) -> Any:
        return tf.identity(v), less_the_mean if width % 2 == 0 else lambda dv: tf.clip_by_norm(dv, 1e-3)

    if (width + ord(name[-1])) % 3 == 0:
        # The Dense layer makes sure that there are weights below it.
        return keras.layers.Lambda(on_the_way_back, name=name)(keras.layers.Dense(width, name=f"{name}_under")(x))
    function = by_their_number if width % 2 else less_the_mean
    if width % 3 == 0:
        return keras.layers.Lambda(function, name=name)(x)
    if width % 3 == 1:
        return keras.layers.Activation(function, name=name)(x)
    inner = keras.Input(x.shape[1:])
    return keras.Model(inner, less_the_mean(inner), name=name)(x)


def twins(x: keras.KerasTensor, width: int, name: str) -> keras.KerasTensor:
    """The sum of two models made by one function, whose variables have the same paths."""

    def twin(side: str) -> keras.Model:
        inner = keras.Input(x.shape[1:])
        hidden = keras.layers.Dense(width, activation="tanh", name=f"{name}_hidden")(inner)
        return keras.Model(inner, hidden, name=f"{name}_{side}")

    return keras.layers.Add(name=f"{name}_add")([x, twin("left")(x), twin("right")(x)])


class Positions(keras.layers.Layer):
    """Adds a table that is looked up with constants, as in Keras' transformer example, along the last dim but one."""

    def __init__(self, length: int, width: int, **options):
        super().__init__(**options)
        self.length = length
        self.table = keras.layers.Embedding(length, width, name="positions")
        self.supports_masking = True

    def build(self, shape):
        self.table.build((self.length,))

    def call(self, x):
        return x + ops.cast(self.table(ops.arange(self.length)), x.dtype)


class RowTokens(keras.layers.Layer):
    """Adds rows of tables whose numbers are made of the sizes of what layers return: one row for each row of the batch,
    counted in an RNN's output and in columns, and one for each step."""

    def __init__(self, length: int, width: int, **options):
        super().__init__(**options)
        self.rnn = keras.layers.SimpleRNN(width, return_sequences=True, name="steps")
        self.token = keras.layers.Embedding(1, width, name="token")
        self.places = keras.layers.Embedding(length, width, name="places")

    def build(self, shape):
        self.rnn.build(shape)
        self.token.build(())
        self.places.build(())

    def call(self, x):
        steps = self.rnn(x)
        columns = ops.transpose(steps, (1, 0, 2))
        rows = ops.shape(steps)[0], ops.shape(columns)[1]
        added = [self.token(ops.zeros((each, 1), "int32")) for each in rows]
        added += [self.places(ops.arange(ops.shape(steps)[1])), steps]
        return x + sum(ops.cast(each, x.dtype) for each in added)


class Some(keras.layers.Layer):
    """Looks up the ids above 0; other ids give 0."""

    def __init__(self, rows: int, width: int, **options):
        super().__init__(**options)
        self.width, self.table = width, keras.layers.Embedding(rows, width, name="some")

    def build(self, shape):
        self.table.build(shape)

    def call(self, ids):
        if isinstance(ids, keras.KerasTensor):
            return keras.KerasTensor((*ids.shape, self.width), self.compute_dtype)
        import tensorflow as tf

        places = tf.where(ids > 0)
        shape = tf.concat([tf.shape(ids, tf.int64), [self.width]], 0)
        found = tf.scatter_nd(places, self.table(tf.gather_nd(ids, places)), shape)
        return tf.reshape(found, [-1, *ids.shape[1:], self.width])


class AndMean(keras.layers.Layer):
    """Adds the mean over the rows of its second input to each row of its first."""

    def call(self, inputs):
        return inputs[0] + ops.mean(inputs[1], axis=0, keepdims=True)


class RowMask(keras.layers.Embedding):
    """Masks ids below the mean of their row. All numbers are whole, so nothing is rounded."""

    def __init__(self, rows: int, width: int, **options):
        super().__init__(rows, width, **options)
        self.supports_masking = True

    def compute_mask(self, ids, mask=None):
        return ids * ids.shape[1] >= ops.sum(ids, axis=1, keepdims=True)


class BatchMask(RowMask):
    """Like RowMask, but ids below the mean of the whole batch are not masked either."""

    def compute_mask(self, ids, mask=None):
        return ops.logical_or(super().compute_mask(ids), ids * ops.sum(ops.ones_like(ids)) < ops.sum(ids))


class Twice(keras.layers.Layer):
    """Looks up its table twice: with the ids, and with other ids computed from them."""

    def __init__(self, rows: int, width: int, **options):
        super().__init__(**options)
        self.rows = rows
        self.table = keras.layers.Embedding(rows, width, name="twice")

    def build(self, shape):
        self.table.build(shape)

    def call(self, ids):
        return self.table(ids) - 0.5 * self.table((ids * 3 + 1) % self.rows)


class Looked(keras.layers.Layer):
    """Looks up its tables without an Embedding: one of whole numbers, one that is not trained, and one in two ways."""

    def __init__(self, rows: int, width: int, **options):
        super().__init__(**options)
        self.rows, self.width = rows, width

    def build(self, shape):
        self.table = self.add_weight(shape=(self.rows, self.width), initializer="uniform", name="table")
        self.fixed = self.add_weight(shape=(self.rows, self.width), initializer="ones", trainable=False, name="fixed")

    def call(self, ids):
        import tensorflow as tf

        ids = tf.gather(tf.range(self.rows)[::-1], tf.cast(ids, "int32") % self.rows)  # -1: the last row
        by_row = ops.take(self.table, ids, axis=0)
        by_place = tf.gather_nd(ops.convert_to_tensor(self.table), tf.cast(ids, "int64")[..., None])
        return 2.0 * by_row - 0.5 * by_place * tf.gather(ops.convert_to_tensor(self.fixed), ids)
