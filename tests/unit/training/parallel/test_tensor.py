"""A table that is cut by rows, and random layers between cut ones: two members in one process."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfdist.config import Config
from tfdist.control.exit_codes import ConfigError
from tfdist.training.parallel.tensor import parallelize_layers, vocabulary, vocabulary_objective

ROWS = 9


def looked_up_by(rank, ids):
    """What member `rank` of two adds to the sum."""
    layer = layers.ReversibleEmbedding(ROWS, 3, tie_weights=True)
    layer.build((None, None))
    table = np.arange(ROWS * 3, dtype=np.float32).reshape(ROWS, 3)
    layer.embeddings.assign(table)
    rule = vocabulary(leave=lambda found, group: found)
    (part,) = rule(layer, types.SimpleNamespace(size=2, index=rank)).values()
    layer.embeddings.assign(part.cut(table))
    return layer(tf.constant(ids)).numpy(), table


def test_rows_come_together_and_what_no_member_has_is_nan():
    ids = np.array([[0, 8, 9], [4, -9, -1], [5, -10, -5]], np.int32)
    (first, table), (second, _) = (looked_up_by(rank, ids) for rank in range(2))
    there = (ids >= -ROWS) & (ids < ROWS)
    np.testing.assert_array_equal((first + second)[there], table[ids[there]])
    assert np.isnan((first + second)[~there]).all()


def test_a_label_outside_the_vocabulary_gives_nan():
    """No member has its logit. One process stops there, or gets NaN on a GPU."""
    alone = types.SimpleNamespace(size=1, index=0, all_max=lambda x: x, all_reduce=lambda x: x)
    config = Config().replace(objective="next_token", label_smoothing=0.1).model
    logits = np.random.default_rng(0).normal(size=(2, 4, ROWS)).astype("float32")
    labels = np.array([[0, ROWS - 1, ROWS, 3], [-1, -100, 4, 2**32]])
    objective = vocabulary_objective(config, alone, ROWS)
    losses = objective(logits, labels, tf.ones([2])).losses.numpy()
    is_known = (labels >= 0) & (labels < ROWS)
    np.testing.assert_array_equal(np.isnan(losses), ~is_known)
    expected = keras.losses.CategoricalCrossentropy(True, label_smoothing=0.1, reduction="none")(
        np.eye(ROWS)[labels[is_known]], logits[is_known]
    )
    np.testing.assert_allclose(losses[is_known], expected, rtol=1e-5)
    of_known = objective(logits, labels, tf.constant(is_known, tf.float32))  # the others count for nothing
    np.testing.assert_allclose(tf.reduce_sum(of_known.losses * of_known.weights), np.sum(expected), rtol=1e-5)


def test_a_label_outside_the_vocabulary_gives_a_gradient_of_nan():
    """float16 looks at the gradient only: a step whose loss alone is NaN would be made."""
    alone = types.SimpleNamespace(size=1, index=0, all_max=lambda x: x, all_reduce=lambda x: x)
    objective = vocabulary_objective(Config().replace(objective="next_token").model, alone, ROWS)
    logits, labels = tf.Variable(tf.zeros([1, 3, ROWS])), np.array([[2, ROWS, -1]])

    def gradient(weights):
        with tf.GradientTape() as tape:
            scores = objective(logits, labels, tf.constant(weights))
            loss = tf.reduce_sum(scores.losses * scores.weights)
        return tape.gradient(loss, logits).numpy()

    assert np.isnan(gradient([[1.0, 1.0, 1.0]])).all(-1).tolist() == [[False, True, True]]
    assert np.isfinite(gradient([[1.0, 0.0, 0.0]])).all()


def test_matrices_side_by_side_of_unequal_size_are_refused():
    x = keras.Input((6,))
    model = keras.Model(x, layers.Dense(64, name="block_00_attention_qkv")(x))
    with pytest.raises(ConfigError, match="model=2, .*attention_qkv/kernel as 3 matrices .* 64 is no multiple of 3"):
        parallelize_layers(model, types.SimpleNamespace(size=2, index=0, all_reduce=tf.identity))


class Shifting(layers.Layer):
    """Two generators of its own, and no name that a rule knows."""

    def __init__(self):
        super().__init__(name="between")
        self.one, self.other = keras.random.SeedGenerator(3), keras.random.SeedGenerator(4)

    def call(self, x, training=False):
        return x + sum(keras.random.normal(keras.ops.shape(x), seed=seed) for seed in (self.one, self.other))


BETWEEN = {
    "Dropout": lambda: layers.Dropout(0.5, seed=1, name="between"),
    "GaussianNoise": lambda: layers.GaussianNoise(1.0, seed=1, name="between"),
    "its own": Shifting,
}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_random_layers_between_cut_ones_draw_for_their_part(between):
    """One process draws for each unit; the same numbers on every rank would be another distribution."""
    drawn = []
    for rank in range(2):
        x = keras.Input((6,))
        y = between()(layers.Dense(64, name="block_00_mlp_up")(x))
        y = layers.Dropout(0.5, seed=2, name="behind")(layers.Dense(64, name="block_00_mlp_down")(y))
        model = keras.Model(x, y)
        group = types.SimpleNamespace(size=2, index=rank, all_reduce=tf.identity)
        assert len(parallelize_layers(model, group)) == 3
        found = [
            model.get_layer(name)(tf.ones([2, size]), training=True).numpy()
            for name, size in (("between", 32), ("behind", 64))
        ]
        assert all(len(np.unique(each)) > 1 for each in found)
        drawn.append(found)
    (first, first_whole), (second, second_whole) = drawn
    assert (first != second).any() and (first_whole == second_whole).all()


class RowNoise(layers.Layer):
    """One number for each row, by a generator of its own, by none, or one for all."""

    def __init__(self, seed=None, dims=1):
        super().__init__(name="between")
        self.seed, self.dims = seed, dims

    def call(self, x, training=False):
        shape = (keras.ops.shape(x)[0], 1)[: self.dims]
        return x * keras.random.uniform(shape, seed=self.seed) if training else x


ALIKE = {
    "Dropout of rows": lambda: layers.Dropout(0.5, noise_shape=(None, 1), seed=1, name="between"),
    "its own": lambda: RowNoise(keras.random.SeedGenerator(3), dims=2),
    "without a generator": lambda: RowNoise(dims=2),
    "one number": lambda: RowNoise(keras.random.SeedGenerator(3), dims=0),
}


def between_cut_ones(rank, between, subclassed=False):
    """What the layer draws on its part of 64 units, in 8 rows, and the model."""
    keras.utils.set_random_seed(5)
    x = keras.Input((6,))
    up, down = layers.Dense(64, name="block_00_mlp_up"), layers.Dense(6, name="block_00_mlp_down")
    model = keras.Model(x, down(between(up(x))))
    if subclassed:
        functional = model

        class Own(keras.Model):
            def __init__(self):
                super().__init__()
                self.up, self.between, self.down = (functional.get_layer(each.name) for each in (up, between, down))

            def call(self, x, training=False):
                return self.down(self.between(self.up(x), training=training))

        model = Own()
        model(np.zeros([1, 6], np.float32))
    parallelize_layers(
        model,
        types.SimpleNamespace(size=2, index=rank, all_reduce=tf.identity),
        rows=np.zeros([2, 6], np.float32),
    )
    return between(tf.ones([8, 32]), training=True).numpy()


@pytest.mark.parametrize("between", ALIKE.values(), ids=ALIKE)
def test_what_all_units_share_is_drawn_alike_on_all_ranks(between):
    """Else half of a row's units would be dropped without the others."""
    (first, second) = (between_cut_ones(rank, between()) for rank in range(2))
    np.testing.assert_array_equal(first, second)
    assert (first == first[:, :1]).all()


class Drawing(layers.Layer):
    """Adds what a function of (x, its generator) draws."""

    def __init__(self, draw):
        super().__init__(name="between")
        self.draw, self.seed = draw, keras.random.SeedGenerator(3)

    def call(self, x, training=False):
        return x + self.draw(x, self.seed) if training else x


def flat(x, seed):
    rows, units = keras.ops.shape(x)
    return keras.ops.reshape(keras.random.normal((rows * units,), seed=seed), (rows, units))


def sliced(x, seed):
    return keras.random.normal((keras.ops.shape(x)[0], 64), seed=seed)[:, : x.shape[1]]


def grouped(x, seed):
    drawn = keras.random.normal((keras.ops.shape(x)[0], 4), seed=seed)
    return keras.ops.repeat(drawn, x.shape[1] // 4, axis=1)


def one_too_many(x, seed):
    return keras.random.normal((keras.ops.shape(x)[0] + 1, 1), seed=seed)[:-1]


def test_rows_times_units_are_drawn_for_the_part():
    (first, second) = (between_cut_ones(rank, Drawing(flat)) for rank in range(2))
    assert (first != second).any()


def test_another_number_of_rows_is_drawn_alike():
    (first, second) = (between_cut_ones(rank, Drawing(one_too_many)) for rank in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("draw", [sliced, grouped])
def test_what_is_drawn_for_all_units_whatever_the_part_is_refused(draw):
    with pytest.raises(ConfigError, match="layers around between, which draws rows x .* whatever part of its input"):
        between_cut_ones(0, Drawing(draw))


def halved(x, seed):
    rows, units = keras.ops.shape(x)
    return keras.ops.repeat(keras.random.normal((rows // 2, units), seed=seed), 2, axis=0)


def paired(x, seed):
    """Which takes an even number of rows only, and draws a gate of rows beside."""
    noise = keras.ops.reshape(keras.ops.reshape(x, (2, x.shape[0] // 2, x.shape[1])), keras.ops.shape(x)) * 0
    noise += keras.random.normal(keras.ops.shape(x), seed=seed)
    return noise * keras.random.uniform((keras.ops.shape(x)[0], 1), seed=seed)


def in_function(x, seed):
    return traced(x, seed)


traced = tf.function(lambda x, seed: keras.random.normal(keras.ops.shape(x), seed=seed), autograph=False)


@pytest.mark.parametrize("draw", [halved, paired, in_function])
def test_other_ways_to_draw_for_a_part(draw):
    (first, second) = (between_cut_ones(rank, Drawing(draw)) for rank in range(2))
    assert (first != second).any()


def test_numbers_that_are_always_the_same_are_refused_for_a_part():
    with pytest.raises(ConfigError, match="layers around between, which draws with a whole number as seed"):
        between_cut_ones(0, Drawing(lambda x, _: keras.random.normal(keras.ops.shape(x), seed=7)))


def test_a_layer_that_draws_alike_for_a_part_and_for_something_whole_is_refused():
    x = keras.Input((32,))
    dropout = layers.Dropout(0.5, name="shared")
    up, down = layers.Dense(64, name="block_00_mlp_up"), layers.Dense(6, name="block_00_mlp_down")
    model = keras.Model(x, down(dropout(up(dropout(x)))))
    with pytest.raises(ConfigError, match="around shared, which draws rows x 32 numbers for a part, and as many for"):
        parallelize_layers(model, types.SimpleNamespace(size=2, index=0, all_reduce=tf.identity))


class WithoutGenerator(layers.Layer):
    def call(self, x, training=False):
        return x + keras.random.normal(keras.ops.shape(x)) if training else x


OWN = {**BETWEEN, "without a generator": lambda: WithoutGenerator(name="between")}


@pytest.mark.parametrize("between", OWN.values(), ids=OWN)
def test_random_layers_of_subclassed_models_draw_for_their_part(between):
    (first, second) = (between_cut_ones(rank, between(), subclassed=True) for rank in range(2))
    assert first.shape == (8, 32) and (first != second).any()


class ByTensorFlow(layers.Layer):
    def __init__(self, generator=None):
        super().__init__(name="between")
        self.draw = generator.normal if generator else tf.random.normal

    def call(self, x, training=False):
        return x + self.draw(tf.shape(x)) if training else x


@pytest.mark.parametrize("generator", [None, tf.random.Generator.from_seed(3)], ids=["tf.random", "Generator"])
def test_what_tensorflow_draws_for_a_part_is_refused(generator):
    with pytest.raises(ConfigError, match="cuts the layers around between, which draws by tf.random"):
        between_cut_ones(0, ByTensorFlow(generator))
    x = keras.Input((6,))
    y = layers.Dense(6, name="block_00_mlp_down")(layers.Dense(64, name="block_00_mlp_up")(x))
    whole = ByTensorFlow(generator)
    model = keras.Model(x, whole(y))
    parallelize_layers(model, types.SimpleNamespace(size=2, index=0, all_reduce=tf.identity))
    assert whole(tf.ones([8, 6]), training=True).shape == (8, 6)


def test_a_layer_with_lora_is_refused():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, name="block_00_mlp_up")])
    model.layers[0].enable_lora(2)
    with pytest.raises(ConfigError, match="cuts layer block_00_mlp_up .*, but it has LoRA weights.*data="):
        parallelize_layers(model, types.SimpleNamespace(size=2, index=0, all_reduce=tf.identity))


class Thinned(layers.Layer):
    """Drops the same columns in training, so that what comes behind has another shape there."""

    def call(self, x, training=False):
        return x[:, :4] if training else x


class Counted(Shifting):
    """Adds a loss, and counts."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        self.calls.assign_add(1)
        self.add_loss(keras.ops.sum(x))
        return super().call(x)


def cut(rank, between):
    x = keras.Input((6,))
    y = layers.Dense(64, name="block_00_mlp_up")(layers.Dense(8)(x))
    y = between(y)
    y = layers.Dense(6, name="block_00_mlp_down")(y)
    model = keras.Model(x, layers.Dropout(0.5, seed=2, name="behind")(Thinned()(y)))
    parallelize_layers(model, types.SimpleNamespace(size=2, index=rank, all_reduce=tf.identity))
    return model


def test_a_layer_whose_shape_differs_in_training_is_whole_all_the_same():
    drawn = [cut(rank, lambda y: y).get_layer("behind")(tf.ones([2, 4]), training=True).numpy() for rank in range(2)]
    assert len(np.unique(drawn[0])) > 1 and (drawn[0] == drawn[1]).all()


def test_what_a_random_layer_on_parts_does_beside_drawing_is_kept():
    found = []
    for rank in range(2):
        layer = cut(rank, Counted()).get_layer("between")
        calls = float(layer.calls.numpy())
        one, again = layer(tf.ones([2, 32])), layer(x=tf.ones([2, 32]))
        assert float(layer.calls.numpy()) == calls + 2 and len(layer.losses) == 1
        assert (one.numpy() != again.numpy()).any()  # as in one process
        found.append([one.numpy(), layer.one.state.numpy()])
    assert (found[0][0] != found[1][0]).any() and (found[0][1] == found[1][1]).all()
