"""More cases for tests/parity/test_fit.py: models whose step makes something else of a batch than (inputs, labels), and
models that need one input whole."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.parity.fit_cases import samples
from tests.parity.fit_gradient_cases import is_refused, weights
from tests.parity.fit_inside_cases import CASES, case

__all__ = ["CASES"]  # those of all files

LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Prepared(keras.Model):
    """Not built before its first batch. `prepared` makes inputs and labels of a batch."""

    def __init__(self, prepared, **options):
        super().__init__(**options)
        self.hidden, self.last, self.prepared = layers.Dense(6, activation="tanh"), layers.Dense(3), prepared

    def call(self, x, training=None):
        return self.last(self.hidden(x))

    def train_step(self, data):
        x, y = self.prepared(data)
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x, y, outputs)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self._loss_tracker.update_state(loss)
        return self.compute_metrics(x, y, outputs)

    def test_step(self, data):
        x, y = self.prepared(data)
        outputs = self(x, training=False)
        self._loss_tracker.update_state(self.compute_loss(x, y, outputs))
        return self.compute_metrics(x, y, outputs)


@case
def batches_of_which_a_step_makes_others(fit, evaluate, predict, folder):
    """The labels and inputs that the step makes decide which accuracy is meant, and how large the model is."""
    x, y = samples(47)
    one_hot = np.eye(3, dtype="float32")[y]
    found = {}
    for name, prepared, data, loss in (
        ("classes", lambda batch: (batch[0], tf.argmax(batch[1], -1)[:, None]), (x, one_hot), LOGITS),
        ("one-hot", lambda batch: (batch[0], tf.one_hot(batch[1], 3)), (x, y), "mse"),
        ("columns", lambda batch: (batch[0][:, :5], batch[1]), (x, y), LOGITS),
        ("one dict", lambda batch: (batch["x"], batch["y"]), ({"x": x, "y": y},), LOGITS),
    ):
        keras.utils.set_random_seed(1)
        model = Prepared(prepared)
        if name == "classes":  # the others are built by their first batch
            model(x[:2])
        model.compile("adam", loss, metrics=["accuracy"])
        dataset = tf.data.Dataset.from_tensor_slices(data if len(data) > 1 else data[0]).batch(10)
        history = fit(model, dataset, epochs=2)
        found[name] = [history.history, weights(model), evaluate(model, dataset)]
    return found


@case
def layers_that_training_alone_uses(fit, evaluate, predict, folder):
    class Auxiliary(Prepared):
        def build(self, shape):
            self.aside = layers.Dense(3)

        def call(self, x, training=None):
            outputs = super().call(x)
            return outputs + 0.3 * self.aside(x) if training else outputs

        train_step, test_step = keras.Model.train_step, keras.Model.test_step

    x, y = samples(47)
    model = Auxiliary(None)
    model.compile("adam", LOGITS)
    return {"history": fit(model, x, y, batch_size=10, epochs=2).history, "weights": weights(model)}


@case
def an_input_of_which_all_rows_are_wanted(fit, evaluate, predict, folder):
    """With a static number of rows and without one, and a last batch of fewer rows."""

    class Averaged(keras.Model):
        def __init__(self):
            super().__init__()
            self.rows, self.all, self.last = layers.Dense(6), layers.Dense(6), layers.Dense(3)

        def call(self, inputs):
            mean = ops.mean(self.all(inputs["all"]), axis=0, keepdims=True)
            self.add_loss(0.1 * ops.mean(ops.square(self.rows(inputs["rows"]) + mean)))
            return self.last(self.rows(inputs["rows"]) + mean)

    x, y = samples(47)
    inputs = {"rows": x, "all": x[::-1].copy()}
    found = {}
    for name, data in (
        ("arrays", None),
        ("dataset", tf.data.Dataset.from_tensor_slices((inputs, y)).batch(10)),
        ("static", tf.data.Dataset.from_tensor_slices((inputs, y)).batch(10, drop_remainder=True)),
    ):
        keras.utils.set_random_seed(1)
        model = Averaged()
        model.compile("sgd", LOGITS)
        options = {"x": inputs, "y": y, "batch_size": 10} if data is None else {"x": data}
        found[name] = [fit(model, **options, epochs=2).history, weights(model)]
    return found


@case
def each_text_with_each_image(fit, evaluate, predict, folder):
    """Logits of all pairs in a batch; a worker computes its rows of them."""
    x, _ = samples(47)
    one, other = keras.Input((8,)), keras.Input((8,))
    pairs = layers.Lambda(lambda both: ops.matmul(both[0], ops.transpose(both[1])), output_shape=(None,))
    model = keras.Model([one, other], pairs([layers.Dense(4)(one), layers.Dense(4)(other)]))
    # SGD, because Adam turns rounding errors into steps where a gradient is 0, as that of the second bias is here.
    model.compile("sgd", lambda y, logits: ops.logsumexp(logits, 1) - ops.diagonal(logits))
    history = fit(model, [x, x[:, ::-1].copy()], np.zeros(47), batch_size=10, epochs=2)
    return {"history": history.history, "weights": weights(model)}


class TwoArguments(Prepared):
    def call(self, x, other=None, training=None):
        rows = x if other is None else x * self.over_rows(other)
        return super().call(rows)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, 0.5 * x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@case
def models_that_are_called_with_two_arguments(fit, evaluate, predict, folder):
    x, y = samples(46)

    def fitted(over_rows):
        keras.utils.set_random_seed(1)
        model = TwoArguments(None)
        model.over_rows = over_rows
        model.compile("sgd", LOGITS)
        fit(model, x, y, batch_size=10, epochs=2)
        return weights(model)

    return {
        "refused": is_refused(lambda: fitted(lambda other: other - ops.mean(other, 0)), "depends on the other rows"),
        "apart": fitted(ops.tanh),
    }


@case
def layers_that_mix_what_no_small_try_shows(fit, evaluate, predict, folder):
    x, y = samples(46)

    def refused(layer):
        model = keras.Sequential(
            [keras.Input((8,)), layers.Reshape((2, 4, 1)), layer, layers.Flatten(), layers.Dense(3)]
        )
        model.compile("sgd", LOGITS)
        return is_refused(lambda: fit(model, x, y, batch_size=23), "depends on the other rows")

    room = layers.Lambda(lambda x: ops.where(ops.arange(ops.shape(x)[0])[:, None, None, None] < 15, x, 0 * x))
    return {"mixed up": refused(layers.MixUp()), "cut": refused(layers.CutMix()), "with room for 15": refused(room)}


@case
def what_only_as_many_rows_as_a_batch_has_show(fit, evaluate, predict, folder):
    x, y = samples(96)

    class First(layers.Layer):
        """Adds a loss of the first rows."""

        def call(self, x):
            self.add_loss(ops.mean(x[:8] ** 2))
            return x

    def refused(layer, words):
        model = keras.Sequential([keras.Input((8,)), layers.Dense(6), layer, layers.Dense(3)])
        model.compile("sgd", LOGITS)
        return is_refused(lambda: fit(model, x, y, batch_size=96), words)

    def halved(x):
        return ops.concatenate([x[:80], 0.5 * x[80:]])

    def above_the_90th(x):
        return x / (1e-3 + tf.math.top_k(ops.norm(x, axis=-1), 90)[0][-1])  # there is no such row among a few

    return {
        "place": refused(layers.Lambda(halved, (6,)), "depends on the other rows"),
        "fails with few": refused(layers.Lambda(above_the_90th, (6,)), "depends on the other rows"),
        "added": refused(First(), "neither a mean nor a sum over the rows"),
    }


@case
def losses_inside_in_float64(fit, evaluate, predict, folder):
    x, y = samples(40)
    keras.config.set_floatx("float64")
    try:
        model = keras.Sequential(
            [keras.Input((8,)), layers.Dense(6, activity_regularizer="l2"), layers.Dense(3, kernel_regularizer="l2")]
        )
        model.compile("sgd", LOGITS)
        history = fit(model, x.astype("float64"), y, batch_size=16, epochs=2)
        return {"history": history.history, "weights": weights(model)}
    finally:
        keras.config.set_floatx("float32")
