"""What a layer keeps without Keras' knowing comes back, and what it draws goes on: of `tfdist.train` and of backups."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.unit.training.test_step import W, X, Y, batches, make_step
from tfdist.artifacts import backup_checks, state
from tfdist.artifacts.backup import BackupAndRestore
from tfdist.artifacts.hidden_state import (
    hidden_generators,
    hidden_state,
    hidden_variables,
    variables_of_model,
)
from tfdist.artifacts.objects_inside import tensors_in
from tfdist.compat import keras_random, tensorflow_random
from tfdist.control.exit_codes import ConfigError
from tfdist.keras_fit import epoch_backup
from tfdist.runtime.one_device import OneDevice

BESIDE = keras.random.SeedGenerator(3)


class Keeps(keras.layers.Layer):
    """A variable, a generator, and what it draws without one, if it does."""

    def __init__(self, draws_without=False):
        super().__init__()
        self.draws_without = draws_without
        self.count = tf.Variable(0.0, trainable=False)
        self.inner = [{"of": tf.random.Generator.from_seed(4)}]

    def call(self, x, training=False):
        if not training:
            return x
        self.count.assign_add(0.1)
        drawn = self.inner[0]["of"].normal(tf.shape(x))
        if self.draws_without:
            drawn += keras.random.normal(tf.shape(x))
        return x + self.count + 0.3 * drawn


class DrawsBeside(keras.layers.Layer):
    """From a generator that no layer holds."""

    def call(self, x):
        return x + keras.random.normal(tf.shape(x), seed=BESIDE)


def model_of(layer):
    keras.utils.set_random_seed(1)
    keras_random.use_generator(None)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), keras.layers.BatchNormalization(), layer])


@pytest.fixture(autouse=True)
def _generator_of_keras():
    before = keras_random.global_seed_generator()
    yield
    keras_random.use_generator(before)


def test_what_is_found():
    layer = Keeps()
    model = model_of(layer)
    model.compile("adam", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    assert [each is layer.count for each in hidden_variables(model)] == [True]
    assert [each is layer.inner[0]["of"].state for each in hidden_generators(model)] == [True]
    plain = keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.3), keras.layers.Dense(4)])
    assert not hidden_variables(plain) and not hidden_generators(plain)


def test_a_step_goes_on_where_a_snapshot_was_taken():
    def run(begin, steps):
        step = make_step(model=model_of(Keeps()))
        variables = state.collect(step.model, step.optimizer, step.variables)
        if begin is not None:
            state.assign(variables, begin)
        done = int(step.counter.numpy())
        step(iter_from(done), steps)
        return state.to_host(variables)

    def iter_from(done):
        return batches(16, X[16 * done :], Y[16 * done :], W[16 * done :])

    undisturbed, resumed = run(None, 5), run(run(None, 2), 3)
    assert {"hidden/0000", "generator/0000"} <= undisturbed.keys()
    for key, value in undisturbed.items():
        np.testing.assert_array_equal(resumed[key], value, err_msg=key)


def arrays():
    return {"x": X, "y": X[:, :4], "batch_size": 32, "shuffle": False}


def drawing():
    """Data that draw from the same generator as the model; they are read again."""
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    keras_random.made_global_seed_generator()
    dataset = tf.data.Dataset.from_tensor_slices((X, X[:, :4])).batch(32).with_options(options)
    return {"x": dataset.map(lambda x, y: (x + keras.random.normal(tf.shape(x)), y))}


@pytest.mark.parametrize("data", [arrays, drawing])
def test_a_fit_goes_on_where_it_was_killed(data, tmp_path):
    """With the backup of tfdist.fit, and with that for Keras."""

    class Killed(Exception):
        pass

    class Kills(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise Killed

    def run(*callbacks):
        model = model_of(Keeps(draws_without=True))
        model.compile(keras.optimizers.Adam(0.1), "mse", jit_compile=False)
        model.fit(**data(), epochs=4, verbose=0, callbacks=callbacks)
        drawn = keras_random.global_seed_generator().state
        return [np.asarray(each) for each in (*model.weights, drawn, *hidden_variables(model))]

    def of_tfdist_fit():
        return epoch_backup.replace([keras.callbacks.BackupAndRestore(tmp_path / "tfdist.fit")], OneDevice())

    def for_keras():
        return [BackupAndRestore(tmp_path / "Keras")]

    undisturbed = run()
    for backup in (of_tfdist_fit, for_keras):
        with contextlib.suppress(Killed):
            run(*backup(), Kills())
        for found, wanted in zip(run(*backup()), undisturbed, strict=True):
            np.testing.assert_array_equal(found, wanted, err_msg=backup.__name__)


def test_what_nobody_would_save_is_refused():
    step = make_step(model=keras.Sequential([keras.Input((6,)), DrawsBeside(), keras.layers.Dense(4)]))
    with pytest.raises(ConfigError, match="SeedGenerator that no layer tracks"):
        step(batches(16), 1)
    keras.random.normal([2], seed=BESIDE)  # elsewhere it may be drawn from


def test_generators_draw_others_on_another_rank_and_go_on_alike():
    def draw(rank):
        generator = tf.random.Generator.from_seed(4)
        with tensorflow_random.keys_moved(rank):
            return tf.function(lambda: generator.normal([8]))().numpy(), generator.state.numpy()

    (first, state_of_first), (second, state_of_second), plain = draw(0), draw(1), tf.random.Generator.from_seed(4)
    np.testing.assert_array_equal(first, plain.normal([8]))
    assert not np.isin(second, first).any() and abs(second.mean()) < 2
    np.testing.assert_array_equal(state_of_first, state_of_second)


def test_a_module_of_the_users_whose_name_begins_like_one_of_pythons():
    class Kept:
        def __init__(self):
            self.count = tf.Variable(0.0, trainable=False)

        def __call__(self, x):
            return x + self.count

    Kept.__module__ = "enums"
    layer = keras.layers.Activation(kept := Kept())
    assert [variable is kept.count for variable in hidden_variables(layer)] == [True]


@pytest.mark.parametrize("slots, name", [("count", "count"), (("__count",), "_Own__count")])
def test_a_variable_in_a_slot(slots, name):
    own = type("Own", (), {"__slots__": slots})()
    setattr(own, name, count := tf.Variable(0.0, trainable=False))
    layer = keras.layers.Layer()
    layer.held = own
    assert [variable is count for variable in hidden_variables(layer)] == [True]


def test_tensors_are_found_in_all_that_is_not_a_layer():
    class Own:
        def __init__(self, value):
            self.value, self.cyclic = value, self

    x = tf.constant([1.0, 2.0])
    ragged = tf.RaggedTensor.from_row_lengths(x, [1, 1])
    for value in (x, [3, (x,)], [[[[[[x]]]]]], {"a": Own([x])}, Own(lambda: x), ragged):
        assert [each for each in tensors_in(value) if each is x], value
    layer = keras.layers.Layer()
    layer.x = x
    assert tensors_in([layer, "text", tf.Variable(x), Own(1)]) == []


def test_the_slots_of_a_users_optimizer_are_no_hidden_state():
    """They are made in the first step: a backup would refuse them, as made too late."""

    class Own(keras.optimizers.Adam):
        pass

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(Own(), "mse")
    at_first = variables_of_model(model)
    model.optimizer.build(model.trainable_variables)
    assert hidden_state(model) == []
    backup_checks.refuse_later_variables(model, at_first)
