"""Whether an objective looks at other samples of the batch, found out by trying it."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.control.exit_codes import ConfigError
from tfdist.training.own_objective import own_objective
from tfdist.training.row_checks import objective_rows, row_mixing, row_proof
from tfdist.training.row_checks.model_probe import ROWS
from tfdist.training.row_checks.row_proof import Proofs
from tfdist.training.scores import Scores

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(40, 5)).astype("float32")
Y = RANDOM.normal(size=(40, 3)).astype("float32")
Y[30, 0] = 9
W = np.ones(40, "float32")


def read():
    """The first samples, and an iterator over more of them."""
    batches = (
        (X[first : first + ROWS], Y[first : first + ROWS], W[first : first + ROWS]) for first in range(0, 40, ROWS)
    )
    return next(batches), batches


def squares(outputs, y):
    return tf.reduce_sum(tf.square(outputs - y), -1)


def contrast(outputs, y, w):
    """In-batch negatives."""
    logits = tf.matmul(outputs, y, transpose_b=True)
    labels = tf.range(tf.shape(logits)[0])
    return Scores(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits), w, {})


def limited(outputs, y, w):
    losses = squares(outputs, y)
    return Scores(losses * tf.minimum(1.0, 2000.0 / tf.reduce_max(losses)), w, {})


MIXING = {
    "contrast": contrast,
    "mean": lambda outputs, y, w: Scores(tf.sqrt(tf.reduce_mean(squares(outputs, y))) * tf.ones_like(w), w, {}),
    "focal": lambda outputs, y, w: Scores(squares(outputs, y) / tf.reduce_max(squares(outputs, y)), w, {}),
    "above a value": limited,
    "number": lambda outputs, y, w: Scores(squares(outputs, y) / tf.cast(tf.shape(y)[0], tf.float32), w, {}),
    "weights": lambda outputs, y, w: Scores(squares(outputs, y), w / tf.reduce_sum(w), {}),
    "metric": lambda outputs, y, w: Scores(squares(outputs, y), w, {"rank": w * tf.reduce_mean(outputs)}),
    "if": lambda outputs, y, w: Scores(
        2 * squares(outputs, y) if tf.reduce_max(y) > 0.7 else squares(outputs, y), w, {}
    ),
}


def at_random(mean, stddev=0.01):
    """In-batch negatives, and noise in the outputs. mean: of the noise."""
    return lambda outputs, y, w: contrast(outputs + stddev * mean(tf.shape(outputs)), y, w)


def straight_through(outputs, y, w):
    """Each value is the sample's own; the gradient is that of the distance to the mean of all."""
    own, soft = squares(outputs, y), squares(outputs - tf.reduce_mean(outputs, 0), y)
    return Scores(tf.stop_gradient(own - soft) + soft, w, {})


GENERATOR, SEEDS = tf.random.Generator.from_seed(1), keras.random.SeedGenerator(1)


def in_a_loop(shape):
    return tf.map_fn(lambda _: tf.random.normal(shape[1:]), tf.zeros(shape[0]))


def by_numpy(shape):
    return tf.reshape(
        tf.numpy_function(lambda of: np.random.normal(size=of).astype("float32"), [shape], tf.float32), shape
    )


MIXING |= {
    "random": at_random(tf.random.normal),
    "random of Keras": at_random(keras.random.normal),
    "random with a generator of Keras": at_random(lambda shape: keras.random.normal(shape, seed=SEEDS)),
    "random with a generator": at_random(GENERATOR.normal),
    "random in a loop": at_random(in_a_loop),
    "random by NumPy": at_random(by_numpy),
    "much noise": at_random(tf.random.normal, 1.0),
    "random and number": lambda outputs, y, w: Scores(
        squares(outputs, y) * tf.random.uniform(tf.shape(w), 0.9) / tf.cast(tf.shape(w)[0], tf.float32), w, {}
    ),
    "gradient": straight_through,
}


def of_the_hardest(outputs, y, w):
    losses = squares(outputs, y)
    least = tf.math.top_k(losses, tf.minimum(8, tf.shape(losses)[0])).values[-1]
    return Scores(losses, w * tf.cast(losses >= least, tf.float32), {})


def of_exactly_8(outputs, y, w):
    """Fails with fewer."""
    losses = squares(outputs, y)
    return Scores(losses, w * tf.cast(losses >= tf.math.top_k(losses, 8).values[-1], tf.float32), {})


def above_16(outputs, y, w):
    """A worker has 16."""
    return of_the_hardest(outputs, y, w) if outputs.shape[0] > 16 else Scores(squares(outputs, y), w, {})


def balanced(outputs, y, w):
    """Classes of which one is rare."""
    rare = tf.reduce_mean(tf.cast(y[:, 0] > 8, tf.float32))
    return Scores(squares(outputs, y), w * tf.where(y[:, 0] > 8, 0.5 / rare, 0.5 / (1 - rare)), {})


MIXING_MANY = {"hardest": of_the_hardest, "exactly 8": of_exactly_8, "above 16": above_16, "balanced": balanced}
APART = {
    "squares": lambda outputs, y, w: Scores(squares(outputs, y), w, {"error": tf.abs(outputs - y)[:, 0]}),
    "weighted": lambda outputs, y, w: Scores(squares(outputs, y), tf.abs(y[:, 0]), {}),
    **{
        f"random {number}": lambda outputs, y, w, draw=draw: Scores(
            squares(outputs + draw(tf.shape(outputs)), y), w, {}
        )
        for number, draw in enumerate((tf.random.normal, keras.random.normal, GENERATOR.normal, in_a_loop, by_numpy))
    },
    "not finite": lambda outputs, y, w: Scores(tf.reduce_sum(tf.math.log(outputs), -1), w, {}),
}


def nearly_cancelling(outputs, y, w):
    """A matrix product of other rows rounds otherwise, and all that is left of 1 - 1 is rounded."""
    projected = outputs @ tf.constant(np.random.default_rng(1).normal(size=(outputs.shape[-1], 64)), outputs.dtype)
    one, other = tf.math.l2_normalize(projected, -1), tf.math.l2_normalize(projected + 1e-3, -1)
    return Scores(tf.cast(1 - tf.reduce_sum(one * other, -1), tf.float32), w, {})


@pytest.mark.parametrize("part, dtype", [*((each, "float32") for each in (2, 3, 8, 33)), (8, "mixed_bfloat16")])
def test_what_is_rounded_otherwise_is_not_refused(part, dtype):
    proofs = Proofs(wide := keras.Sequential([keras.Input((5,)), keras.layers.Dense(64, dtype=dtype)]), 4 * part, part)
    assert not objective_rows.mixes(own_objective("mine:loss", nearly_cancelling), wide, *read(), proofs)


def test_a_trial_has_memory_for_some_rows_only(monkeypatch):
    """A language model's outputs for one sample are 100 million numbers."""
    seen = []

    def watched(outputs, y, w):
        seen.append(outputs.shape[0])
        return APART["squares"](outputs, y, w)

    monkeypatch.setattr(objective_rows, "_MOST_NUMBERS", 3 * 7)
    monkeypatch.setattr(row_proof, "_LARGEST", 3 * 7)
    refuse(watched, many=40, part=16)
    assert max(seen) == 7


def model():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.layers.Input((5,)), keras.layers.BatchNormalization(), keras.layers.Dense(3)])


def refuse(function, other=False, many=4, part=4):
    runtime = SimpleNamespace(all_gather=lambda found: np.stack([found, np.array([other], np.int64)]))
    objective = own_objective("mine:loss", function)
    net = model()
    proofs = Proofs(net, many, part)
    objective_rows.refuse(runtime, "mine:loss", objective, net, read, proofs, row_mixing.IN_PARTS)


@pytest.mark.parametrize("name", MIXING)
def test_what_looks_at_other_samples_is_refused(name):
    with pytest.raises(ConfigError, match="--objective=mine:loss: its result for a sample"):
        refuse(MIXING[name])


@pytest.mark.parametrize("name", MIXING_MANY)
def test_what_shows_with_many_samples_alone_is_refused(name):
    with pytest.raises(ConfigError, match="--objective=mine:loss: its result for a sample"):
        refuse(MIXING_MANY[name], many=40, part=16)
    refuse(MIXING_MANY[name])


@pytest.mark.parametrize("name", APART)
def test_what_looks_at_each_sample_alone_is_not(name):
    """With few samples, as many as a part has, and all."""
    refuse(APART[name], many=40, part=16)


def test_all_workers_refuse_what_one_of_them_finds():
    with pytest.raises(ConfigError, match="mine:loss"):
        refuse(APART["squares"], other=True)


def test_what_cannot_be_tried_is_not_refused():
    def fails(outputs, y, w):
        raise ValueError("mine")

    refuse(fails)
