"""More cases for tests/parity/test_fit.py: derivatives of derivatives by tape.jacobian, tf.vectorized_map and
stateless_call, rows of outputs that a loss looks up, and what callbacks call the model with."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfdist
from tests.parity.fit_batch_cases import CASES, LOGITS, case
from tests.parity.fit_cases import samples
from tests.parity.fit_gradient_cases import is_refused, network, weights

__all__ = ["CASES"]  # those of all files


def of(kind, *between, outputs=3):
    inputs = keras.Input((8,))
    return kind(inputs, network(8, 6, outputs, *between)(inputs))


def fitted(fit, model, rows=25, epochs=2, callbacks=None, **options):
    x, y = samples(rows)
    model.compile(keras.optimizers.SGD(0.3), LOGITS, **options)
    history = fit(model, x, y, batch_size=13, epochs=epochs, shuffle=False, callbacks=callbacks).history
    return {"history": history, "weights": weights(model)}


class Contractive(keras.Model):
    """A penalty on the Jacobian with respect to inputs (Rifai et al. 2011), computed in several ways."""

    how, persistent = "batch_jacobian", False

    def slopes(self, tape, x, outputs, total):
        if self.how == "batch_jacobian":
            return tape.batch_jacobian(outputs, x)
        if self.how == "jacobian":
            return tape.jacobian(total, x)
        each = tf.eye(3)
        along = lambda one: tape.gradient(outputs, x, tf.broadcast_to(one, tf.shape(outputs)))  # noqa: E731
        return tf.vectorized_map(along, each)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as outer:
            with tf.GradientTape(persistent=self.persistent) as tape:
                tape.watch(x)
                outputs = self(x, training=True)
                total = ops.sum(outputs, 0)
            penalty = ops.mean(ops.square(self.slopes(tape, x, outputs, total)))
            loss = self.compute_loss(x, y, outputs) + penalty
        self.optimizer.apply(outer.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss, "penalty": penalty}


class OneByOne(keras.Model):
    """Clips the gradient of each sample."""

    def train_step(self, data):
        def one(sample):
            with tf.GradientTape() as tape:
                loss = self.loss(sample[1][None], self(sample[0][None], training=True))
            return [tf.clip_by_norm(each, 0.1) for each in tape.gradient(loss, self.trainable_variables)]

        gradients = [tf.reduce_mean(each, 0) for each in tf.vectorized_map(one, data)]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"norm": tf.linalg.global_norm(gradients)}


@case
def jacobians(fit, evaluate, predict, folder):
    def penalized(how, persistent=False, **options):
        keras.utils.set_random_seed(1)
        model = of(Contractive)
        model.how, model.persistent = how, persistent
        return fitted(fit, model, **options)

    return {
        "batch": penalized("batch_jacobian"),
        "whole": penalized("jacobian"),
        "eager": penalized("batch_jacobian", persistent=True, rows=13, epochs=1, run_eagerly=True),
        "eager, refused": is_refused(lambda: penalized("jacobian", run_eagerly=True), "persistent=True"),
        "vectorized, refused": is_refused(lambda: penalized("vectorized_map"), "parallel_iterations=1"),
        "one by one": fitted(fit, of(OneByOne), epochs=1),
    }


class FastWeights(keras.Model):
    """Makes a step on the first samples, and takes the loss of the others with the new weights (Finn et al. 2017)."""

    second_order = True

    def loss_with(self, values, others, x, y):
        outputs, others, added = self.stateless_call(values, others, x, training=True, return_losses=True)
        return self.loss(y, outputs) + sum(added), others

    def train_step(self, data):
        x, y = data
        variables, others = self.trainable_variables, [each.value for each in self.non_trainable_variables]
        with tf.GradientTape() as outer:
            values = [variable * 1.1 for variable in variables]
            with tf.GradientTape() as tape:
                tape.watch(values)
                loss, others = self.loss_with(values, others, x[:6], y[:6])
            slope = tape.gradient(loss, values)
            if self.second_order:
                values = [value - 0.5 * each for value, each in zip(values, slope, strict=True)]
                loss, others = self.loss_with(values, others, x[6:], y[6:])
        gradients = outer.gradient(loss, variables) if self.second_order else slope
        for variable, value in zip(self.non_trainable_variables, others, strict=True):
            variable.assign(value)
        self.optimizer.apply(gradients, variables)
        return {"loss": loss, "slope": tf.linalg.global_norm(slope)}


class Scaled(layers.Layer):
    """A custom layer, so that tfdist tries the model; adds a loss."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x * self.scale


@case
def fast_weights(fit, evaluate, predict, folder):
    found = {}
    for name, (between, second_order, options) in {
        "own layer": ([Scaled], False, {}),
        "BatchNormalization": ([layers.BatchNormalization, Scaled], True, {"jit_compile": True}),
        "eager": ([Scaled], True, {"run_eagerly": True, "rows": 13, "epochs": 1}),
    }.items():
        model = of(FastWeights, *(kind() for kind in between))
        model.second_order = second_order
        found[name] = fitted(fit, model, **options)
    return found


class Adversaries(keras.Model):
    """Two models and no call, as in keras.io's GANs; the second is used inside the first, too."""

    def __init__(self, between=layers.BatchNormalization):
        super().__init__()
        self.maker = network(4, 6, 8, between())
        self.judge = network(8, 6, 1, layers.Dropout(0.0), network(6, 5, 5))
        self.fooled, self.seeds = keras.metrics.Mean(name="fooled"), keras.random.SeedGenerator(3)

    @property
    def metrics(self):
        return [self.fooled]

    def compile(self, maker, judge, **options):
        super().compile(**options)
        self.of_maker, self.of_judge = maker, judge

    def train_step(self, data):
        noise = keras.random.normal((ops.shape(data)[0], 4), seed=self.seeds)
        with tf.GradientTape(persistent=True) as tape:
            fake = self.maker(noise, training=True)
            both = self.judge(ops.concatenate([fake, data], 0), training=True)
            with tf.GradientTape() as inner:
                inner.watch(data)
                on_real = self.judge(data)
            slope = ops.mean(ops.square(inner.gradient(on_real, data)))
            tells = ops.mean(ops.softplus(both)) - ops.mean(on_real) + slope
            fools = ops.mean(ops.softplus(-self.judge(fake)))
        for model, optimizer, loss in ((self.maker, self.of_maker, fools), (self.judge, self.of_judge, tells)):
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        self.fooled.update_state(fools)
        return {"fooled": self.fooled.result(), "tells": tells}

    def test_step(self, data):
        self.fooled.update_state(ops.mean(ops.square(self.judge(data))))
        return {"fooled": self.fooled.result()}


class Judged(Adversaries):
    def call(self, x):
        return self.judge(x)


@case
def steps_that_call_inner_models(fit, evaluate, predict, folder):
    x, _ = samples(25)
    found = {}
    for name, kind, options in (
        ("graph", Adversaries, {}),
        ("eager", Adversaries, {"run_eagerly": True}),
        ("with a call", Judged, {}),
    ):
        keras.utils.set_random_seed(1)
        model = kind()
        optimizers = keras.optimizers.SGD(0.2, momentum=0.5), keras.optimizers.SGD(0.2, clipnorm=0.5)
        model.compile(*optimizers, **options)
        histories = []
        for _ in range(1 if name == "eager" else 2):  # the second begins with a model that is built
            if tfdist.init().rank:  # all must begin with the chief's weights
                model.maker.set_weights([0 * weight for weight in model.maker.get_weights()])
            rows = x[:13] if name == "eager" else x  # one step: an eager one takes long
            histories.append(fit(model, rows, batch_size=13, epochs=1, validation_data=(x[:7],)).history)
        found[name] = {"histories": histories, "weights": weights(model), "evaluated": evaluate(model, x[:11])}
        found[name]["slots"] = [[np.asarray(one).tolist() for one in each.variables] for each in optimizers]

    def with_mixed_rows():
        model = Adversaries(lambda: layers.Lambda(lambda x: x - ops.mean(x, 0)))
        model.compile("sgd", "sgd")
        fit(model, x, batch_size=13)

    return {**found, "mixed rows": is_refused(with_mixed_rows, "depends on the other rows")}


class HardOnes(keras.Model):
    """Takes the loss on the rows with the largest losses."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        each = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        rows = ops.top_k(each, 5)[1]
        return self.loss(ops.take(y, rows), ops.take(y_pred, rows, axis=0))


class Calls(keras.callbacks.Callback):
    """Calls the model with NumPy arrays, as Keras' functional models accept them."""

    def __init__(self, x):
        super().__init__()
        self.x, self.found = x, []

    def on_epoch_end(self, epoch, logs=None):
        with tf.GradientTape() as tape:
            outputs = self.model(self.x, training=False)
        gradients = tape.gradient(outputs, self.model.trainable_variables)
        self.found += [outputs.numpy(), *(gradient.numpy() for gradient in gradients)]
        self.found.append(self.model.predict(self.x, verbose=0))


@case
def rows_that_a_loss_looks_up_and_arrays_in_a_callback(fit, evaluate, predict, folder):
    calls = Calls(samples(7)[0].astype("float64"))
    return {**fitted(fit, of(HardOnes), callbacks=[calls], rows=26), "calls": [each.tolist() for each in calls.found]}
