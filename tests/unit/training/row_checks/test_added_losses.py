"""How added losses scale with rows, found out by running a model on a few of them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tfdist.control.exit_codes import ConfigError
from tfdist.runtime.one_device import OneDevice
from tfdist.training.row_checks.added_losses import added_losses, found_by_the_chief, may_add
from tfdist.training.row_checks.reductions import MEAN, SUM
from tfdist.training.row_checks.row_proof import Proofs
from tfdist.training.row_checks.sums_as_means import SumsAsMeans

X = np.random.default_rng(0).normal(size=(6, 5)).astype("float32")


class Adds(keras.layers.Layer):
    """Adds some functions of its input (and of a weight that is 0 at the start)."""

    def __init__(self, *functions, only_training=False, **options):
        super().__init__(**options)
        self.functions, self.only_training = functions, only_training

    def build(self, shape):
        self.gate = self.add_weight(shape=(), initializer="zeros")

    def call(self, x, training=None):
        if training or not self.only_training:
            for function in self.functions:
                self.add_loss(function(x, self.gate))
        return x


class Draws(keras.layers.Layer):
    """The reparametrisation of a variational autoencoder, and its two losses, one of them as a mean and as a sum."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seeds, self.out = keras.random.SeedGenerator(3), layers.Dense(5)

    def call(self, x):
        mean, log_variance = x[:, :2], x[:, 2:4]
        self.add_loss(ops.mean(ops.square(mean) + ops.exp(log_variance) - log_variance))
        z = mean + ops.exp(log_variance / 2) * keras.random.normal(ops.shape(mean), seed=self.seeds)
        y = self.out(z)
        for total in (ops.mean, ops.sum):
            self.add_loss(total(ops.sum(ops.square(y - x), -1)))
        return y


def model_of(*parts, size=5):
    keras.utils.set_random_seed(0)
    x = y = layers.Input((size,))
    for part in parts:
        y = part(y)
    return keras.Model(x, y)


def scales(model, x=X):
    return [one.reduction for one in added_losses(model, x)]


def state(model):
    return [variable.numpy() for variable in model.variables]


def a_sum(x, _):
    return ops.sum(x**2)


def a_mean(x, _):
    return ops.mean(x**2)


def the_largest(x, _):
    return ops.max(x)


def mean_of_the_positive(x, _):
    return ops.sum(ops.relu(x)) / (1.0 + ops.sum(ops.cast(x > 0, "float32")))


def square_of_the_mean(x, _):
    return ops.mean(x) ** 2


def above_a_floor(x, _):
    """Free bits (Kingma et al. 2016, arXiv:1606.04934), far above the floor on all rows."""
    return ops.maximum(ops.mean(x**2), 0.01)


def below_a_ceiling(x, _):
    return ops.minimum(ops.sum(x**2), 100.0)


def of_active_rows(x, _):
    active = ops.cast(ops.max(ops.abs(x), -1) > 0.05, "float32")
    return ops.sum(active * ops.sum(x**2, -1)) / (ops.sum(active) + 1e-6)


def closed(x, gate):
    return ops.sum(gate * x**2)


def of_weights(_, gate):
    return ops.exp(gate)


def never_more_than_0(x, _):
    return ops.sum(ops.relu(-1.0 - x**2))


def test_a_model_of_kerass_layers_adds_nothing():
    model = model_of(layers.Dense(4, kernel_regularizer="l2"), layers.Dropout(0.5))
    assert not may_add(model) and added_losses(model, X) == ()


def test_sums_and_means_in_the_order_of_model_losses():
    first, second = Adds(a_sum, a_mean, of_weights), Adds(a_mean, closed)
    model = model_of(
        layers.Dense(5, activity_regularizer="l2", kernel_regularizer="l2"),
        first,
        layers.BatchNormalization(),
        layers.Dropout(0.5),
        second,
        first,
    )
    before = state(model)
    found = added_losses(model, X)
    assert [(one.layer.name, one.place, one.reduction) for one in found] == [
        (model.layers[1].name, 0, MEAN),
        *((first.name, place, scales) for place, scales in enumerate((SUM, MEAN, MEAN, SUM, MEAN, MEAN))),
        (second.name, 0, MEAN),
        (second.name, 1, SUM),
    ]
    for value, now in zip(before, state(model), strict=True):
        np.testing.assert_array_equal(value, now)
    model(X, training=True)
    assert len(model.losses) == len(found) + 1  # and a weight regularizer
    assert "add_loss" not in vars(first) and "call" not in vars(model.layers[1])


def test_a_value_for_each_row_counts_as_their_sum():
    """As in keras.Model.compute_loss."""
    model = model_of(Adds(lambda x, _: ops.sum(ops.square(x), -1), a_mean))
    assert [one.reduction for one in added_losses(model, X)] == [SUM, MEAN]


@pytest.mark.parametrize(
    "function",
    [
        the_largest,
        mean_of_the_positive,
        square_of_the_mean,
        never_more_than_0,
        above_a_floor,
        below_a_ceiling,
        of_active_rows,
    ],
    ids=lambda function: function.__name__,
)
def test_anything_else_is_refused(function):
    with pytest.raises(ConfigError, match="loss number 2 that layer odd adds"):
        added_losses(model_of(Adds(a_mean, function, name="odd")), X)


def of_the_largest_rows(x):
    rows = ops.sum(x**2, -1)
    return ops.sum(ops.top_k(rows, min(8, rows.shape[0])).values)


@pytest.mark.parametrize(
    "own", [of_the_largest_rows, lambda x: ops.minimum(ops.sum(x**2), 1000.0), lambda x: ops.mean(x**2)]
)
def test_a_layer_of_keras_adds_what_a_users_regularizer_says(own):
    model = model_of(layers.Dense(5, activity_regularizer=own, name="odd"))
    with pytest.raises(ConfigError, match="loss number 1 that layer odd adds is neither .* as Keras divides it"):
        added_losses(model, X, proofs=Proofs(model, 64, 32))


def test_a_sum_of_a_users_regularizer_is_a_mean_as_keras_divides_it():
    model = model_of(layers.Dense(5, activity_regularizer=lambda x: ops.sum(x**2)))
    assert [one.reduction for one in added_losses(model, X, proofs=Proofs(model, 64, 32))] == [MEAN]


@pytest.mark.parametrize("first", [8, 60])
def test_what_takes_the_first_rows_of_a_batch_is_refused(first):
    model = model_of(Adds(a_mean, lambda x, _: ops.mean(x[:first] ** 2), name="odd"))
    with pytest.raises(ConfigError, match="loss number 2 that layer odd adds is neither"):
        added_losses(model, X, proofs=Proofs(model, 64, 32))


def test_many_rows_that_do_not_divide_are_no_reason():
    model = model_of(Adds(a_sum, a_mean))
    assert [one.reduction for one in added_losses(model, X, proofs=Proofs(model, 63, 32))] == [SUM, MEAN]


def test_a_mean_whose_gradient_is_none_is_refused():
    def hidden(x, _):
        spread = ops.mean(ops.var(x, axis=0))
        return ops.mean(x**2) + spread - ops.stop_gradient(spread)

    mean = lambda x, _: ops.mean(x**2)  # noqa: E731
    with pytest.raises(ConfigError, match="loss number 2 that layer odd adds .* or its gradient is not"):
        added_losses(model_of(layers.Dense(5), Adds(mean, hidden, a_sum, name="odd")), X)
    assert [one.reduction for one in added_losses(model_of(layers.Dense(5), Adds(mean, a_sum)), X)] == [MEAN, SUM]


def test_a_layer_that_sets_a_variable_of_its_own_may_add_what_depends_on_no_row():
    """KL warm-up: the factor is 0 at the start."""

    class Warm(Adds):
        def __init__(self, **options):
            super().__init__(lambda x, gate: gate * self.beta, **options)
            self.beta = tf.Variable(0.0, trainable=False)

    model = model_of(layers.Dense(5), Warm(name="warm"))
    assert [one.reduction for one in added_losses(model, X)] == [MEAN]
    assert model.get_layer("warm").beta.numpy() == 0.0


def test_a_mean_over_what_is_not_filled_up_is_refused():
    """Also where the first sentences are all of one length."""

    def masked(x, _):
        real = ops.cast(x != 0, "float32")
        return ops.sum(real * ops.cast(x, "float32")) / ops.sum(real)

    x = layers.Input((4,), dtype="int32")
    y = Adds(masked, name="odd")(x)
    model = keras.Model(x, layers.Embedding(9, 3)(y))
    with pytest.raises(ConfigError, match="that layer odd adds is neither"):
        added_losses(model, np.random.default_rng(0).integers(1, 9, (8, 4)), proofs=Proofs(model, 8, 4))


def test_rows_that_look_alike_do_not_make_a_mean_of_a_maximum():
    limited = model_of(layers.Dense(5, activation="tanh"), Adds(the_largest, name="odd"))
    with pytest.raises(ConfigError, match="that layer odd adds"):
        added_losses(limited, X + 1000)
    x = layers.Input((4,), dtype="int32")
    looked_up = keras.Model(x, Adds(the_largest, name="odd")(layers.Embedding(9, 3)(x)))
    with pytest.raises(ConfigError, match="that layer odd adds"):
        added_losses(looked_up, np.tile([[1, 5, 3, 2]], [4, 1]))


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_few_rows_will_do(rows):
    assert scales(model_of(layers.Dense(3), Adds(a_sum, a_mean, closed)), X[:rows]) == [SUM, MEAN, SUM]


def test_alike_rows_and_nan_do_not_confuse():
    assert scales(model_of(Adds(a_sum, a_mean)), np.ones([4, 5], "float32")) == [SUM, MEAN]
    assert scales(model_of(Adds(a_sum, a_mean)), np.full([4, 5], np.nan, "float32")) == [SUM, MEAN]


def test_only_in_training_behind_dropout_and_batch_statistics():
    model = model_of(
        layers.Dense(5),
        layers.BatchNormalization(),
        layers.GaussianNoise(1.0),
        layers.Dropout(0.5),
        Adds(a_sum, a_mean, only_training=True),
    )
    assert scales(model) == [SUM, MEAN]


@pytest.mark.slow
def test_what_is_random_is_judged_by_its_mean():
    assert scales(model_of(layers.Dense(5), Draws())) == [MEAN, MEAN, SUM]


def test_states_that_keras_does_not_know():
    class Counts(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.calls = tf.Variable(0.0)

        def call(self, x):
            self.calls.assign_add(1.0)
            self.add_loss(ops.sum(x))
            return x

    layer = Counts()
    model = model_of(layer)
    before = float(layer.calls)
    assert scales(model) == [SUM] and float(layer.calls) == before


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float64"])
def test_in_every_precision(policy):
    keras.config.set_dtype_policy(policy)
    try:
        assert scales(model_of(layers.Dense(5), Adds(a_sum, a_mean))) == [SUM, MEAN]
    finally:
        keras.config.set_dtype_policy("float32")


def test_sums_become_means_within_counting_only():
    layer = Adds(a_mean, a_sum)
    model = model_of(layer)
    counted = SumsAsMeans(added_losses(model, X))
    with counted.counting(3.0):
        for _ in range(2):
            model(X, training=True)
            np.testing.assert_allclose(model.losses, [np.mean(X**2), 3 * np.sum(X**2)], rtol=1e-6)
    model(X)
    np.testing.assert_allclose(model.losses, [np.mean(X**2), np.sum(X**2)], rtol=1e-6)


def test_a_model_for_batches_of_one_size():
    def build(layer):
        x = layers.Input(batch_shape=(6, 5))
        return keras.Model(x, layer(ops.reshape(x, (6, 5))))

    silent = build(Adds())
    with found_by_the_chief(OneDevice(), silent, lambda: X).counting(1.0):
        silent(X, training=True)
    loud = build(Adds(a_mean, name="loud"))
    with (
        found_by_the_chief(OneDevice(), loud, lambda: X).counting(1.0),
        pytest.raises(ConfigError, match="^Layer loud adds a loss, but"),  # and no words of Keras' around it
    ):
        loud(X, training=True)


class Annealed(layers.Layer):
    """Adds a loss as far as a variable says that a callback sets."""

    def __init__(self, total, start):
        super().__init__()
        self.total, self.start = total, start

    def build(self, shape):
        self.part = self.add_weight(shape=(), initializer=self.start, trainable=False)

    def call(self, x):
        self.add_loss(self.part * self.total(x**2))
        return x


@pytest.mark.parametrize("start", ["zeros", "ones"])
@pytest.mark.parametrize("total, expected", [(ops.sum, SUM), (ops.mean, MEAN)])
def test_a_loss_that_is_faded_in(total, expected, start):
    """Whether it is a sum must be known before it is there."""
    assert scales(model_of(Annealed(total, start))) == [expected]


def test_all_workers_refuse_what_the_chief_refuses():
    with pytest.raises(ConfigError, match="loss number 1"):
        found_by_the_chief(OneDevice(), model_of(Adds(the_largest)), lambda: X)


def test_what_a_subclassed_model_adds_in_training_alone():
    """It leaves it to Keras to tell its layers that they are training."""

    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner, self.last = Adds(lambda x, _: ops.sum(x * x), only_training=True), layers.Dense(2)

        def call(self, x, training=False):
            return self.last(self.inner(x))

    model = Subclassed()
    model(X)
    assert scales(model) == [SUM]


class Differs(keras.layers.Layer):
    """Adds the mean over rows in training, and something else in evaluation."""

    def __init__(self, otherwise):
        super().__init__()
        self.otherwise = otherwise

    def call(self, x, training=None):
        self.add_loss(ops.mean(ops.square(x)) if training else self.otherwise(x))
        return x


@pytest.mark.parametrize(
    "otherwise, expected",
    [
        (lambda x: ops.sum(ops.square(x)), SUM),
        (lambda x: ops.sum(ops.square(x), -1), SUM),
        (lambda x: ops.mean(ops.abs(x)), MEAN),
        (lambda x: 0.0 * ops.sum(ops.square(x)), MEAN),  # as in training
        (lambda x: ops.mean(ops.var(x, 0)), None),
        (lambda x: ops.max(x), None),
    ],
)
def test_what_is_added_in_evaluation(otherwise, expected):
    model = model_of(Differs(otherwise))
    assert scales(model) == [MEAN]
    if expected:
        assert [one.reduction for one in added_losses(model, X, training=False)] == [expected]
    else:
        with pytest.raises(ConfigError, match="adds in evaluation is neither a mean nor a sum"):
            added_losses(model, X, training=False)
