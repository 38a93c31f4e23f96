"""More cases for tests/parity/test_fit.py: gradients that a custom train_step or loop takes."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfdist
from tests.parity.fit_cases import case, dense, samples, tokens
from tfdist.control.exit_codes import ConfigError
from tfdist.models.blocks import positions


def weights(*models):
    return [weight.tolist() for model in models for weight in model.get_weights()]


def is_refused(run, words):
    """Whether `run` is refused with these words, if there are other workers; else True."""
    if tfdist.init().size == 1:
        return True
    try:
        run()
    except ConfigError as error:
        return words in str(error)
    return False


def network(inputs, units, outputs, *between, activation="tanh"):
    return keras.Sequential(
        [keras.Input((inputs,)), layers.Dense(units, activation=activation), *between, layers.Dense(outputs)]
    )


@case
def spread_gan(fit, evaluate, predict, folder):
    """A gradient through two spread models, with plain SGD, which shows a factor that Adam hides."""
    make, judge = (network(*sizes, layers.BatchNormalization()) for sizes in ((3, 8, 4), (4, 8, 1)))
    optimizers = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1, global_clipnorm=0.5)
    rng = np.random.default_rng(1)

    def train(noise, real):
        with tf.GradientTape(persistent=True) as tape:
            fake = make(noise, training=True)
            on_fake, on_real = judge(fake, training=True), judge(real, training=True)
            fools = ops.mean(ops.softplus(-on_fake))
            tells = ops.mean(ops.softplus(on_fake)) + ops.mean(ops.softplus(-on_real))
        optimizers[0].apply(tape.gradient(fools, make.trainable_variables), make.trainable_variables)
        optimizers[1].apply(tape.gradient(tells, judge.trainable_variables), judge.trainable_variables)
        return fools, tells

    with tfdist.spread(make, optimizers[0]), tfdist.spread(judge, optimizers[1]):
        step = tf.function(train, reduce_retracing=True)
        losses = [
            [
                float(loss)
                for loss in (step if rows > 1 else train)(
                    *(tf.constant(rng.normal(size=(rows, width)).astype("float32")) for width in (3, 4))
                )
            ]
            for rows in (8, 8, 7, 7, 1)
        ]
    return {"losses": losses, "weights": weights(make, judge)}


class Twice(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self(self(x, training=True), training=True) - y))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@case
def model_of_its_own_output(fit, evaluate, predict, folder):
    x, _ = samples(20)
    found = {}
    # One model, as tfdist has to try the loss that it adds.
    model = Twice([keras.Input((8,)), layers.Dense(12, activation="tanh", activity_regularizer="l2"), layers.Dense(8)])
    for name, options in {"graph": {}, "eager": {"run_eagerly": True}, "jit": {"jit_compile": True}}.items():
        rows = slice(14 if name == "jit" else 20)  # compiled for one number of rows
        model.compile(keras.optimizers.SGD(0.2), **options)
        found[name] = {
            "loss": fit(model, x[rows], x[rows, ::-1].copy(), batch_size=7, epochs=2).history["loss"],
            "weights": weights(model),
        }
    return found


class Penalized(keras.Model):
    """The gradient penalty of Gulrajani et al. 2017: a gradient with respect to inputs, differentiated once more."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x, training=None):
        return self.inner(x, training=training)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                tape.watch(x)
                score = self(x, training=True)
            slope = tape.gradient(score, x)
            norm = ops.sqrt(ops.sum(ops.square(slope), axis=1) + 1e-6)
            loss = ops.mean(ops.square(score[:, 0] - y)) + 0.7 * ops.mean(ops.square(norm - 1.0))
        gradients = outer.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "slope": ops.mean(norm), "gradient": tf.linalg.global_norm(gradients)}


@case
def gradient_penalty(fit, evaluate, predict, folder):
    x, _ = samples(29)
    y = x.sum(1) / 3
    found = {}
    for name, (between, options) in {
        "batchnorm": ((layers.BatchNormalization(),), {}),
        "eager": ((), {"run_eagerly": True}),
    }.items():
        model = Penalized(network(8, 12, 1, *between))
        model.build((None, 8))
        model.compile(keras.optimizers.SGD(0.05), **options)
        epochs = 1 if options else 2  # an eager step takes long
        found[name] = {"history": fit(model, x, y, batch_size=9, epochs=epochs).history, "weights": weights(model)}
    return found


class Adversarial(keras.Sequential):
    """Trains on inputs moved along the gradient. The gradients are those at perturbed weights (Foret et al. 2021), and
    are clipped by hand.
    """

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(x)
            loss = self.compute_loss(x, y, self(x, training=True))
        x = x + 0.1 * tf.sign(tape.gradient(loss, x))
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        norm = tf.linalg.global_norm(gradients)
        steps = [0.05 * gradient / norm for gradient in gradients]
        for variable, step in zip(self.trainable_variables, steps, strict=True):
            variable.assign_add(step)
        with tf.GradientTape() as tape:
            sharp = self.compute_loss(x, y, self(x, training=True))
        gradients, _ = tf.clip_by_global_norm(tape.gradient(sharp, self.trainable_variables), 0.5)
        for variable, step in zip(self.trainable_variables, steps, strict=True):
            variable.assign_sub(step)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "sharp": sharp, "norm": norm}


@case
def adversarial_examples_and_gradients_by_hand(fit, evaluate, predict, folder):
    x, y = samples(45)
    model = Adversarial(
        [keras.Input((8,)), layers.Dense(16, activation="relu", kernel_regularizer="l2"), layers.Dense(3)]
    )
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return {"history": fit(model, x, y, batch_size=16, epochs=2).history, "weights": weights(model)}


class TwoUpdates(keras.Sequential):
    """One loss that passes through scale_loss and one that does not; if `scaled`, both do."""

    scaled = True

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            outputs = self(x, training=True)
            first, second = self.compute_loss(x, y, outputs), 0.3 * ops.mean(ops.square(outputs))
            scaled = self.optimizer.scale_loss(first)
            other = self.optimizer.scale_loss(second) if self.scaled else second
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, variables), variables)
        self.optimizer.apply(tape.gradient(other, variables), variables)
        return {"loss": first, "second": second}


@case
def two_updates_in_a_step(fit, evaluate, predict, folder):
    x, y = samples(40)
    found = {}
    for scaled in (False, True):
        model = TwoUpdates(
            [keras.Input((8,)), layers.Dense(16, activation="relu"), layers.Dense(3, activation="softmax")]
        )
        model.scaled = scaled
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        found[str(scaled)] = {"history": fit(model, x, y, batch_size=16, epochs=2).history, "weights": weights(model)}
    return found


class SlopeOfWeights(keras.Sequential):
    """A penalty on the gradient with respect to the weights: a second derivative through the sum over workers."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            slope = tape.gradient(loss, self.trainable_variables)
            total = loss + 0.3 * sum(ops.sum(ops.square(ops.cast(gradient, "float32"))) for gradient in slope)
        self.optimizer.apply(outer.gradient(total, self.trainable_variables), self.trainable_variables)
        return {"loss": loss, "total": total}


@case
def penalty_on_the_gradient_of_weights(fit, evaluate, predict, folder):
    x, y = samples(30)
    model = SlopeOfWeights(
        [keras.Input((8,)), layers.Dense(16, activation="tanh"), layers.Dense(3, activation="softmax")]
    )
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    return {"history": fit(model, x, y, batch_size=16, epochs=2).history, "weights": weights(model)}


class Recomputed(layers.Dense):
    """TensorFlow itself takes further gradients in the backward pass, also of weights."""

    def call(self, x):
        return tf.recompute_grad(lambda x: tf.tanh(x @ self.kernel.value))(x)


@case
def recomputed_layer(fit, evaluate, predict, folder):
    x, y = samples(40)
    model = dense(Recomputed(12, use_bias=False), optimizer=keras.optimizers.SGD(0.1))
    return {"history": fit(model, x, y, batch_size=16, epochs=2).history, "weights": weights(model)}


class Noisy(keras.Sequential):
    """Draws random numbers in its train_step, which sees all rows, from generators of every kind."""

    drawn_by = "keras"
    elsewhere = None  # a list of the class, which Keras does not track

    def train_step(self, data):
        x, y = data
        if self.drawn_by == "tensorflow":
            return super().train_step((x + tf.random.normal(tf.shape(x)), y))
        seeds = {"own": self.generator, "global": None, "elsewhere": self.elsewhere[0]}
        noise = {name: keras.random.normal(tf.shape(x), seed=seed) for name, seed in seeds.items()}
        a, b, c = noise.values()  # the order in which TensorFlow adds these differs between processes
        x = x + (a + b + c)
        return {**super().train_step((x, y)), **{name: ops.mean(values) for name, values in noise.items()}}


def seeds(model):
    return [
        np.asarray(variable.value).tolist()
        for variable in model.variables
        if variable.path.endswith("seed_generator_state")
    ]


@case
def random_numbers_of_a_train_step(fit, evaluate, predict, folder):
    x, y = samples(40)
    found = {}
    for drawn_by, options in itertools.product(("keras", "tensorflow"), ({}, {"run_eagerly": True})):
        rank = tfdist.init().rank
        keras.utils.set_random_seed(5)
        model = Noisy([keras.Input((8,)), layers.Dense(3, activation="softmax")])
        model.drawn_by = drawn_by
        model.generator = keras.random.SeedGenerator(3 + rank)  # like one without a seed
        Noisy.elsewhere = [keras.random.SeedGenerator(7 + rank)]
        if rank:
            keras.utils.set_random_seed(50 + rank)
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", **options)
        history = fit(model, x, y, batch_size=16, epochs=1, shuffle=False).history
        everyone = {name: tfdist.init().all_gather(np.array(history[name])) for name in sorted(history)}
        found[f"{drawn_by} {options}"] = {
            "same": {name: bool((values == values[0]).all()) for name, values in everyone.items()},
            "seeds": seeds(model),
            # TensorFlow draws the same numbers on all workers, but others than in one process.
            "history": history if drawn_by == "keras" else None,
        }
    return found


class Rows(layers.Layer):
    """Returns noise from Keras and from TensorFlow, with a generator and without one."""

    def __init__(self):
        super().__init__()
        self.generator, self.of_tensorflow = keras.random.SeedGenerator(4), tf.random.Generator.from_seed(4)

    def call(self, x):
        return (
            x + keras.random.normal(tf.shape(x), seed=self.generator),
            keras.random.normal(tf.shape(x)),
            tf.random.normal(tf.shape(x)),
            self.of_tensorflow.normal(tf.shape(x)),
        )


@case
def random_numbers_of_the_rows(fit, evaluate, predict, folder):
    """Rows get different numbers; the state is the same everywhere, and the same as in one process."""
    inputs = keras.Input((4,))
    found = {}
    keras.utils.set_random_seed(2)
    model = keras.Model(inputs, Rows()(inputs))  # one model, whose rows tfdist has to try once
    for options in ({}, {"run_eagerly": True}):
        model.compile(**options)
        noise = [np.asarray(values) for values in predict(model, np.zeros([8, 4], "float32"), batch_size=8)]
        again = [np.asarray(values) for values in predict(model, np.zeros([8, 4], "float32"), batch_size=8)]
        everyone = tfdist.init().all_gather(noise[0])
        found[str(options)] = {
            "rows": [len({tuple(row) for row in values}) for values in noise],
            "again": [bool((a == b).any()) for a, b in zip(noise, again, strict=True)],
            "same": bool((everyone == everyone[0]).all()),
            "seeds": seeds(model),
        }
    return found


@case
def dropout_leaves_one_state(fit, evaluate, predict, folder):
    x, y = samples(40)
    model = dense(layers.Dropout(0.5, seed=3), layers.GaussianNoise(0.1))
    fit(model, x, y, batch_size=16, epochs=2)
    return {"seeds": seeds(model)[:1]}


class Positions(layers.Layer):
    """As in Keras' own example of a transformer: token and position embeddings.

    `kinds`: the lookups that do not depend on the batch, and those that have each row once.
    """

    def __init__(self, kinds):
        super().__init__()
        self.kinds = kinds
        self.tokens, self.positions = layers.Embedding(20, 6), layers.Embedding(12, 6)
        self.rnn = layers.SimpleRNN(6, return_sequences=True) if "rnn" in kinds else None

    def build(self, shape):
        for layer in (self.tokens, self.positions):
            layer.build(None)
        if self.rnn:
            self.rnn.build((None, 12, 6))

    def call(self, ids):
        x = self.tokens(ids)
        if self.rnn:  # whose states are time-major inside
            x = self.rnn(x)
            self.rows, steps = ops.shape(x)[:2]
            x = x + self.positions(ops.zeros((self.rows, 1), "int32")) + self.positions(ops.arange(steps))
        if "positions" in self.kinds:
            x = x + self.positions(ops.arange(ops.shape(ids)[1]))
        if "duplicates" in self.kinds:
            x = x * (1.0 + ops.sum(self.positions(np.array([3, 3, 1, 3])), axis=0))
        if "both" in self.kinds:
            x = x + ops.mean(self.tokens(np.arange(5)), axis=0) + self.tokens(ids[:, ::-1])
        if "rows" in self.kinds:  # as many as the batch has
            x = (
                x
                + self.positions(ops.broadcast_to(ops.arange(12), ops.shape(ids)))
                + self.positions(ops.zeros_like(ids))
            )
        if "zeros" in self.kinds:
            x = x + self.positions(positions(ids))
        if "unique" in self.kinds:
            unique, places = tf.unique(tf.reshape(ids, [-1]))
            x = x * tf.reshape(tf.gather(self.tokens(unique), places), tf.shape(x))
        if "sparse" in self.kinds:
            x = x + self.tokens(tf.sparse.from_dense(ids))
        if "tensorflow" in self.kinds:
            x = x + tf.gather(self.positions.embeddings.value, tf.range(12))
        return ops.mean(ops.tanh(x), axis=1)


class WithPositions(keras.Model):
    """The sum of several kinds, each with tables of its own."""

    def __init__(self, *kinds):
        super().__init__()
        self.parts, self.out = [Positions(KINDS[kind]) for kind in kinds], layers.Dense(5)

    def build(self, shape):
        for part in self.parts:
            part.build(shape)
        self.out.build((None, 6))

    def call(self, ids):
        return self.out(sum(part(ids) for part in self.parts))


class DividedByRows(WithPositions):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) / ops.cast(self.parts[0].rows, "float32")


KINDS = {
    "rnn": ["rnn"],
    "positions": ["positions", "zeros"],
    "duplicates": ["positions", "duplicates"],
    "both": ["both", "positions", "unique", "sparse"],
    "rows": ["rows", "positions", "tensorflow"],
}
# The gradient of a lookup is made before any setting applies to it, so not every kind needs every setting.
SETTINGS = {
    ("duplicates", "rows"): {
        "clipnorm": (lambda: keras.optimizers.SGD(0.5, clipnorm=0.05), {"jit_compile": True}),
        "adam": (lambda: keras.optimizers.Adam(0.05), {}),
    },
    ("positions", "both", "rnn"): {
        "clipped": (lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.1), {}),
        "accumulated": (lambda: keras.optimizers.Adam(0.05, gradient_accumulation_steps=2), {}),
    },
}


@case
def lookups_whatever_the_batch(fit, evaluate, predict, folder):
    ids, tags = tokens(45)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    found = {}
    for kinds, settings in SETTINGS.items():
        model = WithPositions(*kinds)
        model.build((None, 12))
        for name, (optimizer, options) in settings.items():
            model.compile(optimizer(), loss, **options)
            rows = slice(45 if "jit_compile" in options else 41)  # compiled for one number of rows
            fit(model, ids[rows], tags[rows, 0], batch_size=9, epochs=1)
            found[name] = {
                **{kind: weights(part) for kind, part in zip(kinds, model.parts, strict=True)},
                "out": weights(model.out),
            }
    model.compile("adam", loss, run_eagerly=True)
    found["eager"] = is_refused(lambda: fit(model, ids, tags[:, 0], epochs=1), "run_eagerly")
    model = DividedByRows("rnn")
    model.build((None, 12))
    model.compile("adam", loss)
    found["rows"] = is_refused(lambda: fit(model, ids[:41], tags[:41, 0], batch_size=9, epochs=1), "rows of one worker")
    return found


class Centers(keras.Model):
    """Moves outputs to the center of the largest, which the loss looks up; tied: in the table of the call. Adam squares
    each row of a gradient, and clipping takes their norm: a row must not be there in two halves."""

    def __init__(self, tied):
        super().__init__()
        self.table, self.out = layers.Embedding(20, 5), layers.Dense(5)
        self.centers = None if tied else layers.Embedding(5, 5)

    def build(self, shape):
        for layer in (self.table, self.centers) if self.centers else (self.table,):
            layer.build(None)
        self.out.build((None, 5))

    def call(self, ids):
        return self.out(ops.mean(self.table(ids), 1))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        own = ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True))
        return own + ops.mean(ops.square((self.centers or self.table)(ops.argmax(y_pred, -1)) - y_pred))


@case
def rows_that_a_loss_looks_up_by_the_outputs(fit, evaluate, predict, folder):
    ids, tags = tokens(45)
    found = {}
    for tied, options in ((True, {}), (False, {}), (False, {"run_eagerly": True})):
        if not options:
            keras.utils.set_random_seed(3)
            model = Centers(tied)
            model.build((None, 12))
        model.compile(keras.optimizers.Adam(0.02, clipnorm=0.5), **options)
        history = fit(model, ids, tags[:, 0], batch_size=16, epochs=1, shuffle=False).history
        found[f"tied={tied} {options}"] = {"history": history, "weights": weights(model)}
    return found


@case
def embeddings_eagerly_and_in_pieces(fit, evaluate, predict, folder):
    """Looks up rows of the batch only: without a graph, and with the gradient taken outside the forward function."""
    ids, tags = tokens(20)
    inputs = keras.Input((12,), dtype="int32")
    table = layers.Embedding(20, 6)
    model = keras.Model(
        inputs, layers.Dense(5)(layers.GlobalAveragePooling1D()(table(inputs) + table(inputs[:, ::-1])))
    )
    model.compile(
        keras.optimizers.Adam(0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True
    )
    fit(model, ids, tags[:, 0], batch_size=7, epochs=1)
    optimizer = keras.optimizers.Adam(0.05)
    with tfdist.spread(model, optimizer):
        forward = tf.function(lambda ids: model(ids, training=True))
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = model.loss(tags[:, 0], forward(tf.constant(ids)))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return {"weights": weights(model)}


@case
def bfloat16_layers(fit, evaluate, predict, folder):
    """A gradient has the type of its variable. All numbers are so few and small that bfloat16 is exact."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(-1, 2, (16, 4)).astype("float32"), rng.integers(-1, 2, (16, 2)).astype("float32")
    found, ones = {}, keras.initializers.Ones()
    for name, options in {"kept": {"gradient_accumulation_steps": 2}, "by hand": {}}.items():
        model = keras.Sequential(
            [keras.Input((4,)), layers.Dense(2, use_bias=False, kernel_initializer=ones, dtype="bfloat16")]
        )
        optimizer = keras.optimizers.SGD(0.25, **options)
        model.compile(optimizer, "mse")
        if options:
            fit(model, x, y, batch_size=8, epochs=1, shuffle=False)
        else:
            with tfdist.spread(model, optimizer):
                rows = tf.constant(x, tf.bfloat16)
                with tf.GradientTape() as tape:
                    tape.watch(rows)
                    loss = ops.mean(ops.square(ops.cast(model(rows, training=True), "float32") - y))
                [gradient, slope] = tape.gradient(loss, [*model.trainable_variables, rows])
            model.trainable_variables[0].value.assign_sub(0.25 * gradient)
            found["slope"] = tf.cast(slope, tf.float32).numpy()
        found[name] = model.layers[0].kernel.numpy().astype("float32")
    return found
