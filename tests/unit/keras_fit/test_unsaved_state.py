"""What a fit sets and a backup does not hold, or each worker would have another value of: kept, refused, or told."""

import functools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.fuzz import keras_settings
from tests.unit.keras_fit.test_forward import distribute  # noqa: F401 - a fixture
from tests.unit.keras_fit.test_resumed_data import Killed, KilledAfter
from tests.unit.training.test_unsaved_state_checks import HELD, Counts, Holds, MadeLate, model_of
from tfdist.artifacts import backup
from tfdist.control.exit_codes import ConfigError

X, Y = np.arange(48, dtype="float32").reshape(8, 6) / 48, np.arange(8) % 4
REFUSED = (
    "Each step of this fit sets the variable '(.*/)?calls', which was found neither in .* BackupAndRestore does not"
)
GENERATOR, SEEDS = tf.random.Generator.from_seed(1), keras.random.SeedGenerator(1)


def fit(model, callbacks=(), run=tfdist.fit, epochs=1):
    run(model, X, Y, batch_size=4, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


def compiled(model, loss="sparse_categorical_crossentropy", **options):
    model.compile(**{"optimizer": keras.optimizers.SGD(0.1), "loss": loss, **options})
    return model


def kept(folder):
    return keras.callbacks.BackupAndRestore(folder)


class Centered(keras.losses.Loss):
    """With a running mean of its own, as DINO's has."""

    def __init__(self):
        super().__init__()
        self.center = tf.Variable(tf.zeros(4), trainable=False)

    def call(self, y, outputs):
        self.center.assign(0.9 * self.center + 0.1 * tf.reduce_mean(outputs, 0))
        return tf.reduce_mean(tf.square(outputs - self.center), -1)


class OwnStep(keras.Model):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        HELD.calls.assign_add(1.0)
        return super().train_step(data)


def of_a_module():
    return model_of(keras.layers.Lambda(lambda x: HELD(x)))


@pytest.mark.parametrize("options", [{}, {"jit_compile": True}, {"steps_per_execution": 2}], ids=str)
def test_what_a_backup_does_not_hold_is_refused(options, tmp_path):
    with pytest.raises(ConfigError, match=REFUSED):
        fit(compiled(of_a_module(), **options), [kept(tmp_path)])
    assert not list(tmp_path.glob("tfdist-backup*"))
    fit(compiled(of_a_module(), **options))  # nothing is to be resumed


def test_also_where_the_step_was_traced_before(tmp_path, monkeypatch):
    model = fit(compiled(OwnStep(model_of(keras.layers.Dense(4)))))
    with pytest.raises(ConfigError, match=REFUSED):
        fit(model, [kept(tmp_path)])
    monkeypatch.setattr(OwnStep, "train_step", keras.Model.train_step)
    fit(compiled(model), [kept(tmp_path)])


def relative():
    """To its own running mean, which a metric keeps."""
    seen = keras.metrics.Mean()

    def loss(y, outputs):
        values = tf.reduce_mean(tf.square(outputs), -1)
        seen.update_state(values)
        return values / seen.result()

    return {"loss": loss}


def drawn():
    """By a generator that Keras does not see in a loss, as little as the layer."""
    seeds, layer = keras.random.SeedGenerator(2), keras.layers.Dropout(0.5)

    def loss(y, outputs):
        return tf.reduce_mean(tf.square(layer(outputs, training=True) - keras.random.normal([4], seed=seeds)), -1)

    return {"loss": loss}


def counted():
    """By a metric that is not begun anew."""
    calls = tf.Variable(0.0, trainable=False)
    return {"loss": "sparse_categorical_crossentropy", "metrics": [lambda y, outputs: calls.assign_add(1.0)]}


class Balance(keras.metrics.Metric):
    """Outlives the epoch, and weighs the loss."""

    def __init__(self):
        super().__init__(name="balance")
        self.scale = tf.Variable(1.0, trainable=False)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.scale.assign(0.9 * self.scale + 0.1 * tf.reduce_mean(tf.square(y_pred)))

    def reset_state(self):
        pass

    def result(self):
        return self.scale.read_value()


def balanced():
    metric = Balance()
    return {"loss": lambda y, outputs: tf.reduce_mean(tf.square(outputs), -1) / metric.scale, "metrics": [metric]}


class Smoothed(keras.metrics.Mean):
    """The mean over an epoch of what runs on from epoch to epoch."""

    def __init__(self):
        super().__init__(name="smoothed")
        self.running = tf.Variable(0.0, trainable=False)

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(self.running.assign(0.9 * self.running + tf.reduce_mean(y_pred)))


def smoothed():
    return {"loss": "sparse_categorical_crossentropy", "metrics": [Smoothed()]}


class Warming(keras.optimizers.schedules.LearningRateSchedule):
    """Counts its own calls."""

    def __init__(self):
        self.calls = tf.Variable(0.0, trainable=False)

    def __call__(self, step):
        return 0.01 * self.calls.assign_add(1.0)


def warming():
    return {"loss": "sparse_categorical_crossentropy", "optimizer": keras.optimizers.Adam(Warming())}


def warming_behind_a_loss_scale():
    inner = keras.optimizers.SGD(Warming())
    return {"loss": "sparse_categorical_crossentropy", "optimizer": keras.optimizers.LossScaleOptimizer(inner)}


class Remembers(keras.Model):
    """Keras does not reset the metrics of an inner model, nor those in objects."""

    def __init__(self):
        super().__init__()
        self.seen, self.beside = keras.metrics.Sum(), types.SimpleNamespace(mean=keras.metrics.Mean())

    def call(self, x, training=False):
        if training:
            self.seen.update_state(x)
            self.beside.mean.update_state(x[:, :1])
        return x / (1.0 + self.seen.result() + self.beside.mean.count)


def remembering():
    return {"loss": lambda y, outputs: tf.reduce_mean(tf.square(outputs), -1), "inner": Remembers()}


class NeverReset(keras.metrics.Sum):
    def reset_state(self):
        pass


class Unlisted(keras.Model):
    """Its own list of metrics lacks one; another keeps its value."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.seen, self.shown = inner, keras.metrics.Sum(), NeverReset(name="shown")
        self.build((None, 6))

    def build(self, shape):
        self.built = True

    @property
    def metrics(self):
        return [self.shown]

    def call(self, x):
        return self.inner(x) / (1.0 + self.seen.result())

    def train_step(self, data):
        self.seen.update_state(data[1])
        self.shown.update_state(self.seen.result())
        return super().train_step(data)


def unlisted():
    return {"loss": "sparse_categorical_crossentropy", "around": Unlisted}


BESIDE = [lambda: {"loss": Centered()}, relative, drawn, counted, balanced, smoothed, remembering, unlisted]


def seeded(given):
    keras_settings.seed(1)
    options = given()
    model = model_of(options.pop("inner", None) or keras.layers.Dense(4))
    return compiled(options.pop("around", lambda model: model)(model), **options)


@functools.cache
def uninterrupted(given):
    """Weights and history of plain Keras, which both functions and both callbacks must reach bit for bit."""
    model = fit(seeded(given), run=keras.Model.fit, epochs=3)
    return model.get_weights(), model.history.history


@pytest.mark.parametrize(("run", "make"), [(tfdist.fit, kept), (keras.Model.fit, backup.BackupAndRestore)])
@pytest.mark.parametrize("given", [*BESIDE, warming, warming_behind_a_loss_scale])
def test_what_losses_metrics_and_optimizers_keep_is_kept(given, run, make, tmp_path):
    with pytest.raises(Killed):
        fit(seeded(given), [make(tmp_path), KilledAfter(2)], run, 3)
    resumed = fit(seeded(given), [make(tmp_path)], run, 3)
    weights, history = uninterrupted(given)
    assert all((a == b).all() for a, b in zip(weights, resumed.get_weights(), strict=True))
    assert history == resumed.history.history


class Lazy(Centered):
    """Makes its variable when it is first called."""

    def __init__(self):
        super(Centered, self).__init__()
        self.center = None

    def call(self, y, outputs):
        if self.center is None:
            with tf.init_scope():
                self.center = tf.Variable(tf.zeros(4), trainable=False, name="calls")
        return super().call(y, outputs)


def test_what_a_loss_makes_late_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=REFUSED):
        fit(compiled(model_of(keras.layers.Dense(4)), Lazy()), [kept(tmp_path)])


MADE_LATE = "variable .* of .* was made after fit had begun .*: make it before fit"


class OnlyInTraining(keras.Model):
    """Is built by a call in which one of its layers is not used. Another is never used."""

    def __init__(self, trainable=True):
        super().__init__()
        self.out, self.late, self.unused = keras.layers.Dense(4), keras.layers.Dense(6), keras.layers.Dense(1)
        self.late.trainable = trainable
        self(X)

    def call(self, x, training=False):
        return self.out(self.late(x) if training and self.late else x)


@pytest.mark.parametrize(("run", "make"), [(tfdist.fit, kept), (keras.Model.fit, backup.BackupAndRestore)])
@pytest.mark.parametrize(("trainable", "eagerly"), [(True, False), (False, False), (True, True)])
def test_a_layer_that_only_training_uses_is_refused_when_nothing_is_saved_yet(run, make, trainable, eagerly, tmp_path):
    model = compiled(OnlyInTraining(trainable), run_eagerly=eagerly)
    with pytest.raises(ConfigError, match=f"{MADE_LATE}|{REFUSED.replace('calls', 'kernel|bias')}"):
        fit(model, [make(tmp_path)], run)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(("run", "make"), [(tfdist.fit, kept), (keras.Model.fit, backup.BackupAndRestore)])
def test_a_layer_that_is_never_used_is_not_missed(run, make, tmp_path):
    model = compiled(OnlyInTraining())
    model.late = None
    assert len(fit(model, [make(tmp_path)], run, 2).history.history["loss"]) == 2


@pytest.mark.parametrize(("run", "make"), [(tfdist.fit, kept), (keras.Model.fit, backup.BackupAndRestore)])
def test_what_a_loss_makes_late_in_an_eager_step_is_refused(run, make, tmp_path):
    model = compiled(model_of(keras.layers.Dense(4)), Lazy(), run_eagerly=True)
    with pytest.raises(ConfigError, match=MADE_LATE):
        fit(model, [make(tmp_path)], run)


class Macro(keras.metrics.F1Score):
    """Keras makes the variables of this one at the first batch."""

    def __init__(self):
        super().__init__("macro", name="macro")
        self.running = tf.Variable(0.0, trainable=False)

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(keras.ops.one_hot(keras.ops.reshape(y_true, [-1]), 4), y_pred)
        self.running.assign_add(tf.reduce_mean(y_pred))

    def result(self):
        return super().result() + self.running


class MadeByTheUser(keras.metrics.Metric):
    """The user makes the variables of this one at the first batch."""

    def __init__(self):
        super().__init__(name="own")
        self.total = None

    def update_state(self, y_true, y_pred, sample_weight=None):
        if self.total is None:
            with tf.init_scope():
                self.total = self.add_variable([4], "zeros")
        self.total.assign_add(keras.ops.mean(y_pred, 0))

    def reset_state(self):
        if self.total is not None:
            self.total.assign(keras.ops.zeros(4))

    def result(self):
        return keras.ops.max(self.total)


def macro():
    return {"loss": "sparse_categorical_crossentropy", "metrics": [Macro()]}


def made_by_the_user():
    return {"loss": "sparse_categorical_crossentropy", "metrics": [MadeByTheUser()]}


@pytest.mark.parametrize(
    ("run", "make"),
    [
        (tfdist.fit, kept),
        (keras.Model.fit, backup.BackupAndRestore),
        (keras.Model.fit, lambda folder: backup.BackupAndRestore(folder, save_freq=1)),
    ],
)
@pytest.mark.parametrize("metric", [macro, made_by_the_user])
def test_a_metric_may_make_its_variables_at_the_first_batch(metric, run, make, tmp_path):
    with pytest.raises(Killed):
        fit(seeded(metric), [make(tmp_path), KilledAfter(2)], run, 3)
    again = seeded(metric)
    if metric is macro:  # in the same process, too, where the variables are there before fit
        with pytest.raises(Killed):
            fit(again, [make(tmp_path), KilledAfter(2)], run, 3)
    assert fit(again, [make(tmp_path)], run, 3).history.history == uninterrupted(metric)[1]


class MakesLate(Remembers):
    def __init__(self):
        super().__init__()
        self.seen = MadeByTheUser()

    def call(self, x, training=False):
        if training:
            self.seen.update_state(None, x[:, :4])
        return x


def test_what_a_metric_makes_late_that_is_never_reset_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=REFUSED.replace("calls", "[^']*")):
        fit(compiled(model_of(MakesLate())), [kept(tmp_path)])


@pytest.mark.parametrize("traced", ["fit", "train_on_batch"])
def test_a_step_that_plain_keras_has_traced_is_looked_at(traced, tmp_path):
    model = compiled(of_a_module())
    if traced == "fit":
        fit(model, run=keras.Model.fit)
    else:
        model.train_on_batch(X, Y)
    before = model.train_function
    with pytest.raises(ConfigError, match=REFUSED):
        fit(model, [kept(tmp_path)])
    assert model.train_function is before


class OwnTest(OwnStep):
    def test_step(self, data):
        HELD.calls.assign_add(1.0)
        return super(OwnStep, self).test_step(data)

    def train_step(self, data):
        return super(OwnStep, self).train_step(data)


def test_a_step_of_the_validation_is_looked_at(tmp_path):
    model = compiled(OwnTest(model_of(keras.layers.Dense(4))))
    model(X)
    with pytest.raises(ConfigError, match=REFUSED):
        tfdist.fit(model, X, Y, validation_data=(X, Y), verbose=0, callbacks=[kept(tmp_path)])


def test_a_model_that_is_not_built_is_refused_before_it_trains(tmp_path):
    with pytest.raises(ConfigError, match="needs a built model.*: give it an Input"):
        tfdist.fit(compiled(OwnTest(model_of(keras.layers.Dense(4)))), X, Y, verbose=0, callbacks=[kept(tmp_path)])


def test_draws_are_told_with_a_backup(tmp_path, capsys):
    fit(compiled(model_of(keras.layers.Lambda(lambda x: x + tf.random.normal(tf.shape(x))))))
    assert "tf.random" not in capsys.readouterr().err
    fit(compiled(model_of(keras.layers.Lambda(lambda x: x + tf.random.normal(tf.shape(x))))), [kept(tmp_path)])
    assert "the step draws by tf.random (RandomStandardNormal)" in capsys.readouterr().err


class Own(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="own")
        self.total = tf.Variable(0.0, trainable=False)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(y_pred))

    def reset_state(self):
        self.total.assign(0.0)

    def result(self):
        return self.total.read_value()


def test_what_a_backup_holds_or_needs_not_is_left_alone(tmp_path):
    layers = [Counts(), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.GaussianNoise(0.1)]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(4, Holds())])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW(0.1, use_ema=True))
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy", Own()])
    fit(model, [kept(tmp_path)])


@pytest.mark.parametrize("jit", [False, True])
def test_a_variable_of_a_module_has_no_value_of_all_rows(distribute, jit):  # noqa: F811
    model = of_a_module()
    model.jit_compile = jit
    distribute(model)
    with pytest.raises(ConfigError, match="The model sets the variable '(.*/)?calls' when it is called"):
        tf.function(lambda x: model(x, training=True), autograph=False)(tf.ones([4, 6]))


@pytest.mark.parametrize(
    "layer",
    [
        Counts,
        MadeLate,
        lambda: keras.layers.Dense(4, Holds()),
        lambda: keras.layers.Lambda(lambda x: x + GENERATOR.normal(tf.shape(x))),
        lambda: keras.layers.Lambda(lambda x: x + keras.random.normal(tf.shape(x), seed=SEEDS)),
        lambda: keras.layers.Lambda(lambda x: x + keras.random.normal(tf.shape(x))),
        keras.layers.BatchNormalization,
    ],
)
def test_what_a_model_holds_or_all_workers_advance_alike_is_left_alone(distribute, layer):  # noqa: F811
    model = model_of(layer())
    distribute(model)
    tf.function(lambda x: model(x, training=True), autograph=False)(tf.ones([4, 6]))
