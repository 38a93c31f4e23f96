"""Whether a model's output for a row depends on other rows, found out by running it on a few."""

import contextlib
import random
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.fuzz.layers import BatchMask, RowMask
from tfdist.compat import tensorflow_random
from tfdist.config import Config, ModelConfig
from tfdist.control.exit_codes import ConfigError
from tfdist.data.batch_plan import BatchPlan
from tfdist.runtime.one_device import OneDevice
from tfdist.training.row_checks import added_losses, random_mixing, row_mixing, trial_scope
from tfdist.training.row_checks.row_proof import Proofs
from tfdist.training.row_checks.row_trials import check_rows

X = np.random.default_rng(0).normal(size=(6, 5)).astype("float32")


@pytest.fixture(autouse=True)
def fewer_runs(monkeypatch):
    """Of models that draw: nothing here is as rare as what 200 runs are for."""
    monkeypatch.setattr(random_mixing, "_MOST_RUNS", 40)


class Own(layers.Layer):
    """A function of its input, and of whether it is training."""

    def __init__(self, function, **options):
        super().__init__(**options)
        self.function, self.seeds = function, keras.random.SeedGenerator(1)

    def call(self, x, training=False):
        return self.function(x, training, self.seeds)


class Doubled(layers.BatchNormalization):
    """A BatchNormalization of the user's own, whose moments are synchronised."""

    def call(self, inputs, training=None, mask=None):
        return super().call(2 * inputs, training=training, mask=mask)


class Centered(layers.BatchNormalization):
    """Of which only a part is synchronised."""

    def call(self, inputs, training=None, mask=None):
        outputs = super().call(inputs, training=training, mask=mask)
        return outputs - ops.mean(inputs, axis=0) if training else outputs


class OwnMoments(layers.BatchNormalization):
    """Nobody synchronises its moments."""

    def _moments(self, inputs, mask):
        return ops.moments(inputs, axes=[0])


def model_of(*parts, inputs=None):
    keras.utils.set_random_seed(0)
    x = y = layers.Input((5,)) if inputs is None else inputs
    for part in parts:
        y = part(y)
    return keras.Model(x, layers.Dense(3)(y))


MIXING = {
    "centered": lambda x, training, seeds: x - ops.mean(x, axis=0, keepdims=True),
    "largest": lambda x, training, seeds: x / ops.max(ops.abs(x)),
    "condition": lambda x, training, seeds: ops.where(ops.mean(x) > 0, x, 2 * x),
    "in training": lambda x, training, seeds: x - ops.mean(x, axis=0) if training else x,
    "in inference": lambda x, training, seeds: x if training else x - ops.mean(x, axis=0),
    "attention over rows": lambda x, training, seeds: ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(x))), x),
    "shifted": lambda x, training, seeds: ops.roll(x, 1, axis=0),
    "number of rows": lambda x, training, seeds: x / ops.cast(ops.shape(x)[0], "float32"),
    "number of rows, in training": lambda x, training, seeds: (
        x / ops.cast(ops.shape(x)[0], "float32") if training else x
    ),
    "place": lambda x, training, seeds: x + 0.1 * ops.cast(ops.arange(ops.shape(x)[0])[:, None], "float32"),
    "above a value": lambda x, training, seeds: ops.where(ops.max(x) > 2.95, 2 * x, x),
    "above a norm": lambda x, training, seeds: x / ops.maximum(1.0, ops.norm(x) / 60.0),
    "what is far": lambda x, training, seeds: ops.where(ops.abs(x) > 50.0, ops.mean(x, axis=0), x),
    "random and mixing": lambda x, training, seeds: keras.random.dropout(x, 0.3, seed=seeds) - ops.mean(x, axis=0),
}
APART = {
    "plain": lambda x, training, seeds: ops.relu(x) * 2,
    "normalized": lambda x, training, seeds: x - ops.mean(x, axis=1, keepdims=True),
    "rounded": lambda x, training, seeds: ops.round(10 * x),
    "dropout": lambda x, training, seeds: keras.random.dropout(x, 0.5, seed=seeds) if training else x,
    "positions": lambda x, training, seeds: x + ops.cast(ops.arange(ops.shape(x)[1]), "float32"),
    "dropout in inference": lambda x, training, seeds: keras.random.dropout(x, 0.5, seed=seeds),
    "noise of its own": lambda x, training, seeds: x + tf.random.normal(tf.shape(x)),
    "not finite": lambda x, training, seeds: ops.log(x),
}


def backwards(gradient):
    """The identity, with a gradient of its own."""

    @tf.custom_gradient
    def identity(x):
        return tf.identity(x), gradient

    return lambda x, training, seeds: identity(x)


MIXING_BACKWARDS = {
    "clipped by the norm of all": lambda dy: tf.clip_by_norm(dy, 0.02),
    "clipped by a norm that is far smaller": lambda dy: tf.clip_by_norm(dy, 1e-6),
    "of one norm": lambda dy: dy / tf.norm(dy),
    "centered": lambda dy: dy - tf.reduce_mean(dy, 0),
    "number of rows": lambda dy: dy * tf.cast(tf.shape(dy)[0], dy.dtype),
}
APART_BACKWARDS = {
    "reversed": lambda dy: -0.5 * dy,
    "clipped by the norm of each": lambda dy: tf.clip_by_norm(dy, 0.02, axes=[1]),
    "clipped by a norm of each that is far smaller": lambda dy: tf.clip_by_norm(dy, 1e-6, axes=[1]),
    "clipped by value": lambda dy: tf.clip_by_value(dy, -0.1, 0.1),
}


class Masks(layers.Layer):
    """Leaves x as it is, and masks what is smaller than a limit."""

    def __init__(self, limit, **options):
        super().__init__(**options)
        self.limit, self.supports_masking = limit, True

    def call(self, x, mask=None):
        return x

    def compute_mask(self, x, previous_mask=None):
        return ops.mean(x, -1) > self.limit(x)


@pytest.mark.parametrize("limit, expected", [(ops.mean, True), (lambda x: ops.mean(x, (1, 2))[:, None], False)])
def test_a_mask_counts_as_what_the_model_returns(limit, expected):
    """Keras' losses weigh by it."""
    x = layers.Input((4, 5))
    model = keras.Model(x, layers.Dense(2)(Masks(limit)(x)))
    assert row_mixing.mixes(model, np.random.default_rng(0).normal(size=(6, 4, 5)).astype("float32")) == expected


@pytest.mark.parametrize("mask, expected", [(RowMask, False), (BatchMask, True)])
def test_whole_numbers_that_hang_on_a_few_other_rows(mask, expected):
    """Four rows of four numbers: by far not each shows it."""
    x = layers.Input((4,), dtype="int32")
    model = keras.Model(x, layers.GlobalAveragePooling1D()(mask(11, 6)(x)))
    drawn = [np.random.default_rng(seed).integers(0, 11, (4, 4)).astype("int32") for seed in range(6)]
    assert [row_mixing.mixes(model, ids) for ids in drawn] == [expected] * 6


@pytest.mark.parametrize("name", MIXING_BACKWARDS)
def test_what_looks_at_other_rows_on_the_way_back_is_found(name):
    assert row_mixing.mixes(model_of(layers.Dense(4), Own(backwards(MIXING_BACKWARDS[name]))), X)


GENERATOR = tf.random.Generator.from_seed(3)


def turned_or_not(row):
    return tf.cond(tf.random.uniform([]) < 0.5, lambda: row[::-1], lambda: row)


def mixed_or_noisy(x):
    return tf.cond(tf.random.uniform([]) < 0.15, lambda: x[::-1], lambda: x + tf.random.normal([]))


MIXING_AT_RANDOM = {
    "shuffled": lambda x: tf.random.shuffle(x),
    "pairs": lambda x: x + tf.gather(x, tf.argsort(tf.random.uniform(tf.shape(x)[:1]))),
    "some rows, now and then": lambda x: tf.where(
        tf.random.uniform([tf.shape(x)[0], 1]) < 0.05, tf.random.shuffle(x), x
    ),
    "some steps": lambda x: tf.cond(tf.random.uniform([]) < 0.15, lambda: x[::-1], lambda: x),
    "in the rounds of a loop": lambda x: tf.while_loop(
        lambda i, _: i < 2, lambda i, x: (i + 1, tf.random.shuffle(x)), (0, x)
    )[1],
    "some steps, beside a loop": lambda x: mixed_or_noisy(x) + 0.0 * tf.map_fn(lambda row: row, x),
    "by a generator": lambda x: tf.gather(x, tf.argsort(GENERATOR.uniform(tf.shape(x)[:1]))),
    "some rows, by Keras without a generator": lambda x: ops.where(
        keras.random.uniform([ops.shape(x)[0], 1]) < 0.05, keras.random.shuffle(x), x
    ),
}


def in_training(function):
    """A model that does this with its rows, which are 4 wide."""
    return model_of(layers.Dense(4), Own(lambda x, training, seeds: function(x) if training else x))


def state_of_generator():
    return GENERATOR.state.numpy().tolist()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", MIXING_AT_RANDOM)
def test_what_mixes_by_chance_is_found(name, seed):
    keras.utils.set_random_seed(seed)
    before = state_of_generator()
    assert row_mixing.mixes(in_training(MIXING_AT_RANDOM[name]), X)
    assert state_of_generator() == before


NOISE = {
    "dropout": lambda x: tf.nn.dropout(x, 0.3),
    "one number for all": lambda x: x * tf.random.uniform([]),
    "one place for all": lambda x: x * x[:, tf.random.uniform([], 0, 4, tf.int32)][:, None],
    "by a generator": lambda x: x + GENERATOR.normal(tf.shape(x)),
    "dropout by Keras without a generator": lambda x: keras.random.dropout(x, 0.3),
    "for each row, vectorized": lambda x: tf.vectorized_map(lambda row: row + tf.random.normal([4]), x),
}
NOISE_IN_LOOPS = {
    "for each row": lambda x: tf.map_fn(lambda row: row + tf.random.normal([4]), x),
    "turned around or not, each row": lambda x: tf.map_fn(turned_or_not, x),
}


@pytest.mark.parametrize("noise", [NOISE, NOISE_IN_LOOPS], ids=["outside of loops", "in loops"])
def test_what_is_drawn_is_repeated(noise):
    """All that is drawn, as it comes again for the same rows beside others: else each of these would look mixed."""
    keras.utils.set_random_seed(0)
    before = state_of_generator()
    assert not row_mixing.mixes(in_training(lambda x: tf.add_n([draw(x) for draw in noise.values()])), X)
    assert state_of_generator() == before


MANY = {
    "a place beyond the first rows": lambda x, training, seeds: ops.concatenate([x[:80], 0.5 * x[80:]]),
    "a row in the middle looks at the next, in inference": lambda x, training, seeds: (
        x if training else ops.concatenate([x[:2], x[2:3] + x[3:4], x[3:]])
    ),
    "rolled by many": lambda x, training, seeds: x + 0.3 * ops.concatenate([x[70:], x[:70]]),
    "fails with fewer rows": lambda x, training, seeds: x - tf.reduce_mean(tf.math.top_k(ops.sum(x, 1), 90)[0]),
    "fails outside of a graph": lambda x, training, seeds: (
        x + 0 * tf.gradients(tf.reduce_sum(x), x)[0] - ops.mean(x, 0)
    ),
}


@pytest.mark.parametrize("name", MANY)
def test_models_are_tried_with_as_many_rows_as_a_batch_has_and_in_a_graph(name):
    model = model_of(Own(MANY[name]))
    assert row_mixing.mixes(model, X, proofs=Proofs(model, 96, 48))


TOKENS = np.random.default_rng(3).integers(1, 9, (6, 5))


def trimmed(tokens):
    """As long as the longest, then the mean over positions."""
    length = tf.reduce_max(tf.reduce_sum(tf.cast(tokens != 0, tf.int32), 1))
    return tf.reduce_mean(tf.cast(tokens[:, :length], tf.float32), 1, keepdims=True)


def switched(tokens):
    return tf.cast(tokens, tf.float32) * tf.where(tf.reduce_any(tokens == 9), 2.0, 1.0)


@pytest.mark.parametrize("function", [trimmed, switched])
def test_what_rows_of_tokens_do_to_each_other_is_found(function):
    rows = TOKENS.copy()
    rows[4, 2] = 9
    model = model_of(Own(lambda x, training, seeds: function(x)), inputs=layers.Input((5,), dtype="int32"))
    assert row_mixing.mixes(model, rows, proofs=Proofs(model, 6, 3))


def test_it_is_found_behind_what_the_rows_drive_to_its_limit():
    """Where no gradient of theirs comes back to a weight."""
    model = model_of(layers.Dense(4, activation="tanh"), Own(backwards(MIXING_BACKWARDS["centered"])))
    assert row_mixing.mixes(model, X + 1000)


@pytest.mark.parametrize("name", APART_BACKWARDS)
def test_a_gradient_of_each_row_is_no_mixing(name):
    model = model_of(layers.Dense(4), Own(backwards(APART_BACKWARDS[name])))
    assert not Proofs(model).of(X, added_losses.take_rows, training=True).apart and not row_mixing.mixes(model, X)


def test_a_gradient_that_is_0_but_for_rounding_is_no_mixing():
    """Softmax does away with the bias of the keys."""
    x = layers.Input((4, 6))
    y = layers.MultiHeadAttention(2, 3)(layers.Dense(6)(x), x)
    model = keras.Model(x, Own(backwards(APART_BACKWARDS["reversed"]))(layers.Dense(3)(y)))
    assert not row_mixing.mixes(model, np.random.default_rng(0).normal(size=(6, 4, 6)).astype("float32"))


def test_gradients_of_tensorflows_own_are_no_reason_to_try():
    model = model_of(layers.Dense(4), Own(lambda x, training, seeds: tf.nn.silu(x)))
    assert Proofs(model).of(X, added_losses.take_rows, training=True).apart


def test_gradients_are_looked_at_while_a_step_is_traced_too():
    model, found = model_of(layers.Dense(4), Own(backwards(MIXING_BACKWARDS["centered"]))), []

    def step():
        with tf.GradientTape(), tf.init_scope():  # as tfdist.fit does, in a train_step
            found.append(row_mixing.mixes(model, X))

    tf.function(step, autograph=False).get_concrete_function()
    assert found == [True]


class ClippedWeight(layers.Dense):
    """Clips the gradient of its kernel, which is a sum over rows."""

    def call(self, x):
        return tf.matmul(x, backwards(MIXING_BACKWARDS["clipped by the norm of all"])(self.kernel, False, None))


def test_a_gradient_of_a_weight_that_is_no_sum_over_rows_is_found():
    assert row_mixing.mixes(model_of(ClippedWeight(4)), X)


@pytest.mark.parametrize("name", MIXING)
def test_what_looks_at_other_rows_is_found(name):
    assert row_mixing.mixes(model_of(Own(MIXING[name])), X)
    assert row_mixing.mixes(model_of(layers.Dense(8), layers.BatchNormalization(), Own(MIXING[name])), X)


class FadedIn(layers.Layer):
    """Centers its rows as far as a variable says that a callback sets."""

    def build(self, shape):
        self.part = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        return x - self.part * ops.mean(x, axis=0, keepdims=True)


def test_what_is_not_faded_in_yet_is_found():
    model = model_of(FadedIn())
    assert row_mixing.mixes(model, X) and float(model.layers[1].part) == 0.0


def with_room_for_15(x, training, seeds):
    """As a mixture of experts whose capacity is for more rows than the first attempts have."""
    return ops.where(ops.arange(ops.shape(x)[0])[:, None] < 15, x, 0 * x)


def another_above_10(x, training, seeds):
    return x * ops.where(ops.shape(x)[0] > 10, 2.0, 1.0)


@pytest.mark.parametrize("function", [with_room_for_15, another_above_10])
def test_what_shows_with_as_many_rows_as_a_whole_batch_alone(function):
    model = model_of(Own(function))
    assert row_mixing.mixes(model, X, proofs=Proofs(model, 16)) and not row_mixing.mixes(model, X)


def centered_if_undisturbed(x, training, seeds):
    """What only the attempt with rows as they are finds."""
    known = ops.all(ops.any(ops.all(x[:, None] == X[None], axis=-1), axis=-1))
    return ops.where(known, x - ops.mean(x, axis=0), x)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("hidden", ["by the first weights", "by other rows"])
def test_workers_that_share_the_attempts_find_it_together(workers, hidden):
    """What only one of them finds is refused by all."""
    if hidden == "by other rows":
        model = model_of(Own(centered_if_undisturbed))
    else:
        model = model_of(layers.Dense(4, kernel_initializer="zeros", use_bias=False), Own(MIXING["centered"]))
    found: list[np.ndarray] = []

    def refused(rank: int, by_others: list[np.ndarray]) -> bool:
        def gather(array: np.ndarray) -> np.ndarray:
            found.append(array)
            return np.stack([array, *by_others])

        try:
            row_mixing.refuse(SimpleNamespace(rank=rank, size=workers, all_gather=gather), model, lambda: X)
        except ConfigError:
            return True
        return False

    alone = [refused(rank, []) for rank in range(workers)]
    finders = {"by the first weights": {1: 1, 2: 2, 3: 3, 5: 5}, "by other rows": {1: 1, 2: 2, 3: 2, 5: 2}}
    assert alone.count(True) == finders[hidden][workers] and len(found) == workers
    assert all(refused(rank, found[:workers]) for rank in range(workers) if not alone[rank])


class Subclassed(keras.Model):
    """Leaves it to Keras to tell the layers inside whether they are training."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.last = inner, layers.Dense(3)

    def call(self, x, training=False):
        return self.last(self.inner(x))


class Hidden(layers.Layer):
    """A layer that Keras does not know of, in one that has no argument `training`."""

    def __init__(self, inner):
        super().__init__()
        self.hidden = SimpleNamespace(layer=inner)

    def call(self, x):
        return self.hidden.layer(x)


def mixing_in_training():
    return Own(MIXING["in training"])


def subclassed():
    model = Subclassed(mixing_in_training())
    model(X)
    return model


@pytest.mark.parametrize(
    "made",
    [
        subclassed,
        lambda: model_of(Hidden(mixing_in_training())),
        lambda: model_of(layers.Lambda(lambda x, training=None: x - ops.mean(x, axis=0) if training else x)),
        lambda: model_of(layers.Dense(4, activation=mixing_in_training().__call__)),
    ],
    ids=["subclassed model", "hidden layer", "Lambda", "activation"],
)
def test_what_mixes_in_training_alone_however_it_learns_of_that(made):
    assert row_mixing.may_mix(model := made()) and row_mixing.mixes(model, X)


def test_an_attempt_that_fails_tells_nothing_and_others_do():
    def centered(x, training, seeds):
        if not training:
            raise ValueError("only for training")
        return x - ops.mean(x, axis=0)

    own = Own(lambda x, training, seeds: x)
    model = model_of(own)
    own.function = centered
    assert row_mixing.mixes(model, X)


@pytest.mark.parametrize("name", APART)
def test_what_treats_each_row_alone_is_not(name):
    assert not row_mixing.mixes(model_of(layers.Dense(8), layers.Dropout(0.5), Own(APART[name])), X)


@pytest.mark.parametrize("layer", [layers.BatchNormalization, Doubled])
def test_batch_normalization_is_synchronised_and_no_mixing(layer):
    model = model_of(layer())
    assert not row_mixing.mixes(model, X)
    before = [variable.numpy() for variable in model.variables]
    row_mixing.mixes(model, X)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)


@pytest.mark.parametrize("layer", [Centered, OwnMoments])
def test_what_derives_from_batch_normalization_and_does_more(layer):
    assert row_mixing.mixes(model_of(layer()), X)
    assert row_mixing.mixes(model_of(layers.Dense(4), layers.BatchNormalization(), layer()), X)


def test_batch_normalization_that_holds_a_function_of_the_users():
    layer = layers.BatchNormalization()
    layer.hook = lambda x: x
    model = model_of(layer)
    assert not row_mixing.mixes(model, X) and "_moments" not in vars(layer)


def test_places_in_a_table_and_several_inputs():
    tokens, table = layers.Input((4,), dtype="int32"), layers.Input((2,))
    rows = layers.Embedding(7, 3)(tokens)
    for mixed in (False, True):
        pooled = Own(MIXING["centered"] if mixed else APART["plain"])(ops.mean(rows, axis=1))
        model = keras.Model({"a": tokens, "b": table}, [layers.Dense(2)(pooled), table])
        x = {"a": np.arange(24).reshape(6, 4) % 7, "b": X[:, :2]}
        assert row_mixing.mixes(model, x) is mixed


def test_models_of_keras_layers_alone_are_not_tried():
    assert not row_mixing.may_mix(model_of(layers.Dense(4), layers.LayerNormalization(), layers.BatchNormalization()))
    assert row_mixing.may_mix(model_of(layers.Softmax(axis=0)))
    assert row_mixing.may_mix(model_of(layers.Lambda(lambda x: x)))
    x = layers.Input((5,))
    centered = keras.Model(x, x - ops.mean(x, axis=0, keepdims=True))
    assert row_mixing.may_mix(centered) and row_mixing.may_mix(model_of(layers.Dense(5), centered))
    along = [layers.Reshape((5, 1)), layers.Softmax(axis=-2), layers.LayerNormalization(axis=[-2, -1])]
    assert not row_mixing.may_mix(model_of(*along, layers.Flatten(), layers.Softmax(axis=-1)))
    assert not row_mixing.may_mix(model_of(layers.Reshape((5, 1)), layers.Bidirectional(layers.LSTM(2))))
    for name in ("relu", keras.activations.gelu, None):
        assert not row_mixing.may_mix(model_of(layers.Dense(4, activation=name, kernel_regularizer="l2")))
    initializer = lambda shape, dtype=None: ops.ones(shape, dtype)  # noqa: E731 - of the user's own
    assert not row_mixing.may_mix(model_of(layers.Dense(4, kernel_initializer=initializer, bias_constraint=ops.relu)))


def spectrum():
    return layers.MelSpectrogram(fft_length=64, sequence_stride=32, num_mel_bins=8, max_freq=8000, top_db=20)


@pytest.mark.parametrize(
    "made",
    [
        lambda: model_of(layers.Dense(4, activation=lambda x: x - ops.mean(x, axis=0))),
        lambda: model_of(layers.Activation(lambda x: ops.softmax(x, axis=0))),
        lambda: model_of(layers.Reshape((5, 1)), layers.SimpleRNN(3, activation=lambda x: x / (1 + ops.max(x)))),
        lambda: model_of(model_of(Own(MIXING["centered"]))),
        lambda: model_of(layers.RepeatVector(80), layers.Flatten(), spectrum(), layers.Flatten()),
        lambda: float8(model_of(layers.Dense(4))),
        lambda: model_of(layers.Reshape((1, 5, 1)), layers.MixUp(), layers.Flatten()),
        lambda: model_of(layers.Reshape((1, 5, 1)), layers.CutMix(), layers.Flatten()),
        lambda: model_of(layers.RepeatVector(3), layers.Reshape((1, 5, 3)), layers.RandAugment(), layers.Flatten()),
        lambda: model_of(layers.Softmax(axis=-2)),
        lambda: model_of(layers.UnitNormalization(axis=[-2])),
        lambda: model_of(layers.Reshape((5, 1)), layers.Softmax(axis=(-3, -1)), layers.Flatten()),
        lambda: model_of(layers.Reshape((5, 1)), layers.TimeDistributed(layers.Softmax(axis=-2)), layers.Flatten()),
        lambda: model_of(layers.Dense(4, activation=layers.Softmax(axis=-2))),
        lambda: model_of(layers.Dense(4, activation=ops.flip)),
        lambda: model_of(layers.Lambda(ops.softmax, arguments={"axis": 0})),
        lambda: model_of(layers.Activation(layers.Softmax(axis=0).call)),
        lambda: model_of(layers.Lambda(model_of(Own(MIXING["centered"])).call)),
        lambda: model_of(layers.Dense(1), layers.Reshape(()), layers.Softmax(), layers.Reshape((1,))),
    ],
    ids=[
        "activation_of_Dense",
        "Activation",
        "of_a_recurrent_layer",
        "inner_model",
        "MelSpectrogram",
        "float8",
        "MixUp",
        "CutMix",
        "Equalization_in_RandAugment",
        "axis_-2",
        "axes_in_a_list",
        "axis_-3",
        "negative_in_a_wrapper",
        "layer_as_activation",
        "flip",
        "softmax_in_Lambda",
        "bound_method",
        "model_that_Keras_does_not_track",
        "no_axis_but_rows",
    ],
)
def test_layers_of_keras_that_mix(made):
    model = made()
    assert row_mixing.may_mix(model) and row_mixing.mixes(model, X * np.logspace(0, -5, 6)[:, None].astype("float32"))


def drawn(**options):
    return random.random() + np.random.normal() + tf.random.normal([], **options)


def test_what_a_layer_draws_while_it_is_tried_is_not_missed_later():
    """Workers try different numbers of times; what they draw when they trace must stay the same on all."""
    keras.utils.set_random_seed(3)
    wanted = float(drawn())
    keras.utils.set_random_seed(3)
    model = model_of(Own(lambda x, training, seeds: x * drawn()))
    states = random.getstate(), np.random.get_state()[2], tensorflow_random.state_digest()
    assert not row_mixing.found_together(OneDevice(), model, lambda: X)
    added_losses.found_by_the_chief(OneDevice(), model, lambda: X)
    assert states == (random.getstate(), np.random.get_state()[2], tensorflow_random.state_digest())
    keras.utils.set_random_seed(3)
    with trial_scope.generators_kept():
        assert float(drawn()) == wanted
    assert float(drawn()) == wanted


class HoldsFunction(layers.Layer):
    """A Dropout in a function that the layer holds. If it `mixes` it looks at all rows, behind an `if` on a tensor."""

    def __init__(self, mixes, **options):
        super().__init__(**options)
        self.mixes, self.dense, self.dropout = mixes, layers.Dense(5), layers.Dropout(0.5)
        self.function = tf.function(self._function)

    def build(self, shape):
        self.dense.build(shape)

    def _function(self, x, training):
        x = self.dropout(self.dense(x), training=training)
        if self.mixes and tf.reduce_sum(x) < 1e6:
            x -= tf.reduce_mean(x, 0)
        return x

    def call(self, x, training=False):
        return self.function(x, training)


@pytest.mark.parametrize("mixes", [False, True])
def test_a_function_that_a_layer_holds_is_looked_into_and_keeps_nothing(mixes):
    model = model_of(HoldsFunction(mixes))
    assert row_mixing.found_together(OneDevice(), model, lambda: X) == mixes
    added_losses.found_by_the_chief(OneDevice(), model, lambda: X)
    if not mixes:
        held = model.layers[1]
        with tf.GradientTape() as tape:
            dropped = held(X, training=True)
        assert (dropped.numpy() == 0).any()  # a trial keeps Dropout from it
        assert tape.gradient(dropped, held.dense.kernel.value) is not None  # and takes constants for weights


def test_workers_that_try_and_workers_that_do_not_draw_the_same_later():
    """Also by operations with a seed of their own, of which TensorFlow counts how often they have drawn."""
    later = []
    for rank in (0, 5, 7):  # of eight workers, six try
        keras.utils.set_random_seed(3)
        drawn(seed=1)
        model = model_of(Own(lambda x, training, seeds: x * drawn(seed=1)))
        worker = SimpleNamespace(rank=rank, size=8, all_gather=np.atleast_2d, broadcast_object=lambda value: value)
        row_mixing.found_together(worker, model, lambda: X)
        if rank == 0:
            added_losses.found_by_the_chief(worker, model, lambda: X)
        later.append([float(drawn(seed=1)) for _ in range(2)])
    assert later[0] == later[1] == later[2]


def float8(model):
    model.quantize("float8")
    return model


def test_a_state_that_the_model_hides_from_keras_stays():
    hidden = tf.Variable(0.0)

    def counted(x, training, seeds):
        hidden.assign_add(1.0)
        return x * hidden.read_value()

    assert not row_mixing.mixes(model_of(Own(lambda x, *_: x)), X)
    row_mixing.mixes(model_of(Own(counted)), X)
    assert hidden.numpy() == 0.0


class Counted(layers.Layer):
    """Counts its calls in a variable that Keras does not know, and does something by the count."""

    def __init__(self, function, kind):
        super().__init__()
        self.function, self.count = function, tf.Variable(0, trainable=False, dtype=kind)
        self.seed = keras.random.SeedGenerator(5)

    def call(self, x, training=False):
        if training:
            self.count.assign_add(1)
        return self.function(x, tf.cast(self.count, x.dtype), self.seed)


@pytest.mark.parametrize("kind", ["float32", "int64"])
def test_what_a_model_counts_for_itself_is_the_same_in_each_attempt(kind):
    def centered(x, count, seed):
        return x - ops.mean(x, axis=0) * tf.minimum(1.0, count / 1000 + 0.2)

    def annealed_noise(x, count, seed):
        return x + 0.01 * keras.random.normal(ops.shape(x), seed=seed) * tf.exp(-count / 4)

    assert row_mixing.mixes(model_of(Counted(centered, kind)), X)
    assert not row_mixing.mixes(model_of(Counted(annealed_noise, kind)), X)


def test_a_sentence_names_the_layers_and_what_to_do():
    model = model_of(Own(MIXING["centered"], name="my_centering"))
    with pytest.raises(
        ConfigError, match=r"other rows of its batch, .* \(look at my_centering\).*--row_mixing=replica"
    ):
        row_mixing.refuse(OneDevice(), model, lambda: X)


@pytest.mark.parametrize(
    ("accumulation", "words"),
    [
        (1, "but several workers fill up the last batch of an evaluation, so they would compute"),
        (2, "but workers and micro-batches have some of the rows each, so they would compute"),
    ],
)
def test_the_sentence_says_where_rows_are_not_those_of_one_process(accumulation, words):
    """Two workers of one replica train on whole batches."""
    config = Config(model=ModelConfig(model="mine:net"))
    runtime = SimpleNamespace(rank=0, size=2, compute_workers=2, all_gather=lambda found: np.stack([found, found]))
    with pytest.raises(ConfigError, match=words):
        check_rows(
            config,
            runtime,
            model_of(Own(MIXING["centered"])),
            None,
            BatchPlan(8, accumulation, 1),
            lambda _: iter([(X,)]),
        )


@pytest.mark.parametrize(
    "strategy, accumulation, words",
    [
        ("one_device", 1, None),
        ("one_device", 3, "--global_batch=8, .* --accumulation=3 x 1 replica, the layer elastic .* change one of them"),
        ("parameter_server", 1, "on parameter servers, the layer elastic .* use another --strategy"),
    ],
)
def test_a_layer_that_needs_the_number_of_rows_is_refused_where_it_is_not_known(strategy, accumulation, words):
    model = model_of(layers.Reshape((1, 5, 1)), layers.RandomElasticTransform(name="elastic"), layers.Flatten())
    config, plan = Config().replace(strategy=strategy), BatchPlan(8, accumulation, 1)
    runtime = SimpleNamespace(size=1, compute_workers=1)
    with pytest.raises(ConfigError, match=words) if words else contextlib.nullcontext():
        check_rows(config, runtime, model, None, plan, lambda _: iter([(X,)]))


def test_what_cannot_be_tried_is_not_refused():
    one_size = keras.Model(x := keras.Input(batch_shape=(6, 5)), Own(lambda x, *_: ops.reshape(x, (6, 5)))(x))
    row_mixing.refuse(OneDevice(), one_size, lambda: X)


@pytest.mark.parametrize("rows", [5, 15])
def test_what_mixes_with_as_many_rows_as_a_worker_has(rows):
    """And with neither the whole batch's nor a few."""
    own = Own(lambda x, *_: x - ops.mean(x, axis=0) if x.shape[0] == rows else x)
    model = model_of(own)
    assert row_mixing.mixes(model, X, proofs=Proofs(model, 30, rows)) and not row_mixing.mixes(model, X)


def test_texts_that_are_padded_to_the_longest_of_a_batch():
    def model_with(length):
        texts = layers.TextVectorization(9, output_sequence_length=length, vocabulary=["a", "b"], name="words")
        x = layers.Input((1,), dtype="string")
        return keras.Model(x, layers.GlobalAveragePooling1D()(layers.Embedding(9, 3)(texts(x))))

    x = tf.constant([["a"], ["a b a b a b"], ["b"], ["a b"]])
    model = model_with(None)
    assert row_mixing.may_mix(model) and row_mixing.mixes(model, x)
    assert "give words an output_sequence_length, or mend it" in row_mixing.sentence(model, "mend it")
    assert not row_mixing.may_mix(model_with(4))
