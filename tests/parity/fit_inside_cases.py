"""More cases for tests/parity/test_fit.py: inputs that are no batch, and losses and metrics inside a model's `call`."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfdist
from tests.parity.fit_cases import CASES, CROSSENTROPY, case, dense, samples
from tests.parity.fit_gradient_cases import is_refused, weights

__all__ = ["CASES"]  # those of all files


class Beside(keras.Model):
    """Compares rows with a table that comes with each batch, and adds the mean of the table."""

    def __init__(self):
        super().__init__()
        self.hidden, self.shared = layers.Dense(6, activation="tanh"), layers.Dense(6)

    def build(self, shape):
        for layer in (self.hidden, self.shared):
            layer.build((None, 8))

    def call(self, inputs):
        table = self.shared(inputs["a table"])
        return ops.matmul(self.hidden(inputs["x"]), ops.transpose(table))[:, :3] + ops.mean(table)


@case
def table_beside_the_batch(fit, evaluate, predict, folder):
    x, y = samples(40)
    table = np.random.default_rng(3).normal(size=(50, 8)).astype("float32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    found = {}
    for rows, remainder, options, others in (  # remainder: with and without a static number of rows
        (50, False, {}, (evaluate, predict)),
        (9, True, {}, ()),
        (8, True, {}, (evaluate,)),
        (8, False, {}, (predict,)),
        (8, True, {"run_eagerly": True}, ()),
    ):

        def beside(x, y, rows=rows):
            return {"x": x, "a table": tf.constant(table[:rows])}, y

        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=remainder).map(beside)
        model = Beside()
        model.build(None)
        model.compile(keras.optimizers.SGD(0.1), loss, **options)
        found[f"{rows} {remainder} {options}"] = {
            "history": fit(model, dataset, epochs=1).history,
            "weights": weights(model),
            "others": [function(model, dataset) for function in others],
        }
    model = Beside()
    model.build(None)
    optimizer = keras.optimizers.SGD(0.1)
    with tfdist.spread(model, optimizer):

        @tf.function
        def step(x, table):
            with tf.GradientTape() as tape:
                tape.watch(table)
                loss = ops.mean(ops.square(model({"x": x, "a table": table})))
            return tape.gradient(loss, [table, *model.trainable_variables])

        found["gradient"] = [np.asarray(gradient) for gradient in step(tf.constant(x[:7]), tf.constant(table[:7]))]
    return found


class Traced(keras.Model):
    """Its `call` is a tf.function, which would keep its traces; so would the `call` of a layer in it."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.out = inner, keras.Sequential([keras.Input((12,)), layers.Dense(2)])
        self.inner.build((None, 8))

    @tf.function
    def call(self, inputs, training=False):
        a, b = inputs
        return self.out(ops.concatenate([self.inner(a, training=training), b], -1))


class Louder(layers.Layer):
    """Computes something else in training than in inference."""

    def call(self, x, training=False):
        return 1.5 * x if training else x


class TracedLayer(Louder):
    call = tf.function(Louder.call)


class HalfInTraining(keras.Model):
    """Leaves it to Keras to pass `training` to its layers, but passes it to one in the middle itself."""

    def __init__(self):
        super().__init__()
        self.louder, self.frozen, self.out = Louder(), Louder(), layers.Dense(2)

    def call(self, inputs, training=False):
        a, b = inputs
        return self.out(ops.concatenate([self.louder(a), self.frozen(b, training=False)], -1))


@case
def two_inputs_of_static_shape(fit, evaluate, predict, folder):
    """Both inputs hold rows; also in two towers, where each row of one is multiplied by its row of the other."""
    x, _ = samples(32)
    a, b = keras.Input((8,)), keras.Input((4,))
    summed = keras.Model([a, b], layers.Dense(2)(layers.concatenate([a, layers.Dense(3)(b)])))
    a, b = keras.Input((8,)), keras.Input((4,))
    towers = keras.Model([a, b], layers.Dot(-1)([layers.Dense(2)(a), layers.Dense(2)(b)]))
    found = {}
    for name, model in {
        "summed": summed,
        "towers": towers,
        "half": HalfInTraining(),
        "traced": Traced(TracedLayer()),
    }.items():
        dataset = tf.data.Dataset.from_tensor_slices(((x, x[:, :4]), x[:, :1])).batch(8, drop_remainder=True)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        found[name] = {
            "history": fit(model, dataset, epochs=1).history,
            "weights": weights(model),
            "predict": predict(model, dataset),
        }
    model = Traced(layers.BatchNormalization())
    model.compile(keras.optimizers.SGD(0.1), "mse")
    found["refused"] = is_refused(lambda: fit(model, dataset), "remove @tf.function")
    return found


class Adding(layers.Layer):
    """Adds a loss of its rows. in_evaluation: the kind of loss there, if it is another one."""

    def __init__(self, how, in_evaluation=None):
        super().__init__()
        self.how, self.in_evaluation = how, in_evaluation or how

    def call(self, x, training=False):
        ways = {"mean": [ops.mean], "both": [ops.sum, ops.mean], "turned": [ops.mean, ops.sum], "other": [ops.max]}
        for reduce in ways[self.how if training else self.in_evaluation]:
            self.add_loss(0.03 * reduce(ops.square(x)))
        return x


class WeightedLosses(keras.Model):
    """Weights the losses of each layer itself; one of them has a value for each row."""

    def __init__(self):
        super().__init__()
        self.first, self.out = layers.Dense(5, activity_regularizer="l2"), layers.Dense(3, activation="softmax")

    def call(self, x):
        hidden = self.first(x)
        self.add_loss(ops.mean(ops.square(hidden), -1))
        return self.out(hidden)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        own = ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred))
        return own + 0.3 * sum(self.first.losses) + 0.1 * ops.mean(ops.sqrt(self.losses[0]))


@case
def losses_weighted_by_layer(fit, evaluate, predict, folder):
    x, y = samples(33)  # of the last batch one worker has no rows
    model = WeightedLosses()
    model.compile(keras.optimizers.SGD(0.1))
    history = fit(model, x, y, batch_size=16, epochs=2, validation_data=(x[:7], y[:7])).history
    return {"history": history, "weights": weights(model)}


@case
def losses_added_as_sums(fit, evaluate, predict, folder):
    from tfdist.keras_fit import own_rows

    x, y = samples(45)
    found = {}
    # One model, as tfdist has to try each in training and in evaluation, where its losses are others here.
    model = dense(
        Adding("both", in_evaluation="turned"), layers.Dense(8, activity_regularizer="l2", kernel_regularizer="l2")
    )
    for name, options in {
        "graph": {},
        "compiled": {"jit_compile": True},
        "eager": {"run_eagerly": True},
        "own rows": {},
    }.items():
        before, own_rows.LARGEST = own_rows.LARGEST, -1 if name == "own rows" else own_rows.LARGEST
        try:
            model.compile(keras.optimizers.SGD(0.05), CROSSENTROPY, metrics=["accuracy"], **options)
            rows = 15 if name == "compiled" else 16  # 45 samples: compiled for one number of rows
            epochs = 1 if name == "eager" else 2  # an eager step takes long
            history = fit(model, x, y, batch_size=rows, epochs=epochs, validation_data=(x[:7], y[:7])).history
        finally:
            own_rows.LARGEST = before
        found[name] = {"history": history, "weights": weights(model)}
    with tfdist.spread(model, keras.optimizers.SGD(0.1)):
        step = tf.function(lambda x: (ops.mean(model(x, training=True)), model.losses))
        found["spread"] = [float(loss) for loss in step(tf.constant(x[:9]))[1]]
    model = dense(Adding("mean", "other"))
    found["predict"] = predict(model, x)
    found["refused"] = is_refused(lambda: fit(dense(Adding("other")), x, y, epochs=1), "neither a mean nor a sum")
    found["not evaluated"] = is_refused(lambda: evaluate(model, x, y), "adds in evaluation is neither a mean nor a sum")
    return found


class Counting(keras.Model):
    """Updates metrics in its call."""

    def __init__(self, single=False, **metrics):
        super().__init__()
        self.out = layers.Dense(3, activation="softmax")
        self.mean, self.auc, self.score = metrics.get("mean"), metrics.get("auc"), metrics.get("score")
        self.size, self.single = keras.metrics.Mean(name="size"), single
        self.build(None)

    def build(self, shape):
        self.out.build((None, 8))

    def call(self, x):
        outputs = self.out(x)
        if self.mean is not None:
            self.mean.update_state(ops.mean(outputs) if self.single else ops.max(outputs, axis=-1))
        if self.auc is not None:
            self.auc.update_state(ops.cast(x[:, :1] > 0, "float32"), outputs[:, :1])
        if self.score is not None:
            self.score.update_state(ops.cast(x[:, :3] > 0, "float32"), outputs)
        self.size.update_state(ops.square(x))
        return outputs


class Largest(keras.metrics.Mean):
    """A user's metric, which may compute anything."""


def with_metrics_inside(fit, evaluate, model, rows=11, epochs=2, **options):
    x, y = samples(45)
    model.compile(keras.optimizers.SGD(0.1), CROSSENTROPY, **options)
    return {
        "history": fit(model, x, y, batch_size=rows, epochs=epochs).history,
        "evaluate": evaluate(model, x, y, batch_size=rows),
    }


def with_three_metrics():
    score = keras.metrics.FBetaScore("macro", beta=2.0, threshold=0.3)
    return Counting(mean=keras.metrics.Mean(name="mean"), auc=keras.metrics.AUC(name="auc"), score=score)


@case
def metrics_inside_the_call(fit, evaluate, predict, folder):
    return with_metrics_inside(fit, evaluate, with_three_metrics())


@case
def metrics_inside_the_call_otherwise(fit, evaluate, predict, folder):
    """The added values are found in another way than in a graph, but travel in the same way."""

    def refused(metric, words, **options):
        return is_refused(lambda: with_metrics_inside(fit, evaluate, Counting(mean=metric, **options)), words)

    model = with_three_metrics()
    return {
        "eager": with_metrics_inside(fit, evaluate, model, rows=23, epochs=1, run_eagerly=True),
        # Compiled for one number of rows in each loop.
        "jit": with_metrics_inside(fit, evaluate, model, rows=9, jit_compile=True),
        "own": refused(Largest(name="largest"), "not known to be a sum"),
        "single": refused(keras.metrics.Mean(name="mean"), "single number", single=True),
    }


@case
def single_batches(fit, evaluate, predict, folder):
    x, y = samples(25)
    model = dense()
    weighted = np.arange(9) / 5.0
    found = []
    with tfdist.spread(model):
        for first in (0, 9, 18):  # the workers have unlike numbers of rows, in the end other ones than before
            rows = slice(first, first + 9)
            found.append(model.train_on_batch(x[rows], y[rows], return_dict=True))
            found.append(model.train_on_batch(x[rows], y[rows], sample_weight=weighted[: len(x[rows])]))
            found.append(model.train_on_batch(x[rows], y[rows], class_weight={0: 1.0, 1: 2.0, 2: 0.5}))
            found.append(model.test_on_batch(x[rows], y[rows]))
            found.append(model.predict_on_batch(x[rows]))
    never_compiled = keras.Sequential([keras.Input(x.shape[1:]), layers.Dense(3)])
    with tfdist.spread(never_compiled):
        found.append(tf.reduce_sum(tf.square(never_compiled(tf.constant(x)))))
    return {"found": found, "weights": weights(model), "predict": predict(never_compiled, x, batch_size=7)}


class Centered(layers.Layer):
    """Subtracts the mean of the rows that it is called with."""

    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


@case
def layers_that_mix_rows(fit, evaluate, predict, folder):
    x, y = samples(24)

    def model(*parts):
        made = keras.Sequential([keras.Input(x.shape[1:]), *parts, layers.Dense(3)])
        made.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return made

    def in_a_loop():
        mixing = model(Centered())
        with tfdist.spread(mixing):
            tf.function(mixing)(tf.constant(x))

    words = "depends on the other rows of its batch"
    return {  # first the case that draws weights in one process, too
        "apart": fit(model(layers.Lambda(lambda t: t / ops.max(t, axis=1, keepdims=True))), x, y, epochs=2).history,
        "fit": is_refused(lambda: fit(model(Centered()), x, y), words),
        "evaluate": is_refused(lambda: evaluate(model(layers.Lambda(lambda t: t / ops.max(t))), x, y), words),
        "in_a_loop": is_refused(in_a_loop, words),
    }


class Branching(layers.Layer):
    """Looks up rows in one of two branches."""

    def build(self, shape):
        self.table = self.add_weight(shape=(10, shape[-1]), name="table")

    def call(self, x):
        rows = tf.cast(tf.abs(x[..., 0] * 10) % 10, tf.int32)
        looked_up = tf.cond(
            tf.reduce_sum(tf.abs(x)) > 1e9,
            lambda: 2.0 * tf.gather(self.table.value, rows),
            lambda: tf.gather(self.table.value, rows),
        )
        return x + looked_up


@case
def compiled_loops_and_branches(fit, evaluate, predict, folder):
    x, y = samples(18)
    steps, found = x[:, :6].reshape(18, 2, 3), {}
    inputs = keras.Input((2, 3))
    hidden = layers.Dense(3)(inputs)
    outputs = {
        name: layers.Dense(3)(layers.Flatten()(part(hidden)))
        for name, part in {
            "recurrent": layers.SimpleRNN(3),
            "map_fn": layers.Lambda(lambda t: tf.map_fn(lambda row: tf.tanh(tf.reduce_sum(row, 0)), t)),
            "branches": Branching(),
        }.items()
    }
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for name, output in outputs.items():  # apart, since one of them changes how its whole model is trained
        model = keras.Model(inputs, output)
        model.compile("sgd", loss, jit_compile=True)
        found[name] = fit(model, steps, y, batch_size=9, epochs=2, shuffle=False).history
    together, targets = keras.Model(inputs, outputs), dict.fromkeys(outputs, y)
    together.compile("sgd", dict.fromkeys(outputs, loss), jit_compile=True)
    return {**found, "evaluate": evaluate(together, steps, targets, batch_size=9, return_dict=True)}
