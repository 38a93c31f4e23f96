"""Other seeds, and constants, for what layers draw."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.compat.keras_draws import asked_before_draws, constant_draws, seeds_changed

X = np.ones([4, 6], np.float32)
DRAWS = {  # name -> (what draws, dims of it)
    "normal": (lambda seed: keras.random.normal((4, 1), seed=seed), (4, 1)),
    "truncated_normal": (lambda seed: keras.random.truncated_normal((4, 6), seed=seed), (4, 6)),
    "uniform": (lambda seed: keras.random.uniform((), seed=seed), ()),
    "randint": (lambda seed: keras.random.randint((3,), 2, 9, seed=seed), (3,)),
    "categorical": (lambda seed: keras.random.categorical(X, 2, seed=seed), (4, 2)),
    "gamma": (lambda seed: keras.random.gamma((4, 6), 2.0, seed=seed), (4, 6)),
    "binomial": (lambda seed: keras.random.binomial((4,), 5.0, 0.5, seed=seed), (4,)),
    "beta": (lambda seed: keras.random.beta((4,), 2.0, 3.0, seed=seed), (4,)),
    "dropout": (lambda seed: keras.random.dropout(X, 0.5, seed=seed), (4, 6)),
    "dropout of rows": (lambda seed: keras.random.dropout(X, 0.5, noise_shape=(None, 1), seed=seed), (4, 1)),
    "shuffle": (lambda seed: keras.random.shuffle(np.arange(24.0).reshape(6, 4), seed=seed), (6,)),
}


@pytest.mark.parametrize("draw, dims", DRAWS.values(), ids=DRAWS)
def test_draws_tell_their_dims_and_take_other_seeds(draw, dims):
    met = []

    def change(seed, found):
        met.append(found)
        return seed + 100

    plain, moved = (np.asarray(draw(keras.random.SeedGenerator(seed))) for seed in (3, 103))
    with seeds_changed(change, None):
        changed = np.asarray(draw(keras.random.SeedGenerator(3)))
    if np.asarray(plain).dtype.kind == "f" and changed.size > 4:  # few numbers may be the same
        assert (changed != plain).any()
    # A state is [seed, counter], and both are moved here.
    assert changed.shape == moved.shape and met == [dims]
    np.testing.assert_array_equal(np.asarray(draw(keras.random.SeedGenerator(3))), plain)  # as before


@pytest.mark.parametrize("draw", [draw for draw, _ in DRAWS.values()], ids=DRAWS)
def test_constants_take_the_place_of_draws(draw):
    generator = keras.random.SeedGenerator(3)
    drawn = draw(generator)
    with constant_draws():
        one, again = draw(generator), draw(generator)
    assert one.shape == drawn.shape and one.dtype == drawn.dtype
    np.testing.assert_array_equal(one, again)


def test_dims_of_unknown_rows_and_nested_changes():
    met = []

    def noting(name):
        def change(seed, dims):
            met.append((name, dims))
            return seed

        return change

    generator, asked = keras.random.SeedGenerator(3), []

    @tf.function(input_signature=[tf.TensorSpec([None, 6])])
    def drawn(x):
        with asked_before_draws(asked.append), seeds_changed(noting("outer"), 1), seeds_changed(noting("inner"), 1):
            generator.next()
            drawn = keras.random.normal((keras.ops.shape(x)[0], 1), seed=generator)
            with seeds_changed(lambda seed, _: seed, 2):  # of another
                generator.next()
        return drawn

    drawn(X)
    assert met == [("outer", None), ("inner", None), ("outer", (None, 1)), ("inner", (None, 1))]
    assert len(asked) == 3
