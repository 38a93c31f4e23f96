"""Augmentations that mix samples: found out, refused where a batch comes in parts, else given whole micro-batches."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.config import Config
from tfdist.control.exit_codes import ConfigError
from tfdist.data import input_pipeline, order
from tfdist.data.augment import load_augmentation
from tfdist.data.batch_plan import BatchPlan
from tfdist.data.reading import Reading
from tfdist.data.sources.split import array_split
from tfdist.runtime.one_device import OneDevice
from tfdist.training.row_checks import mixing_augmentation
from tfdist.training.row_checks.mixing_augmentation import with_whole_batches_if_it_mixes

X = np.random.default_rng(0).normal(size=(48, 6)).astype("float32")
SPLIT = array_split("own/train", (X, X[:, :2]))
PARTS, WHOLE = BatchPlan(4, 2, 1), BatchPlan(8, 1, 1)  # of a global batch of 8
HERE = "tests.unit.training.row_checks.test_mixing_augmentation"


def roll(x, y, seeds):
    return 0.7 * x + 0.3 * tf.roll(x, 1, 0), 0.7 * y + 0.3 * tf.roll(y, 1, 0)


def centred(x, y, seeds):
    return x - tf.reduce_mean(x, 0), y


def sometimes(x, y, seeds):
    """For a whole batch, by the seed of its first sample."""
    return tf.cond(order.uniform(seeds, 0)[0] < 0.5, lambda: roll(x, y, seeds), lambda: (x, y))


def rarely(x, y, seeds):
    return tf.cond(order.uniform(seeds, 0)[0] < 0.1, lambda: roll(x, y, seeds), lambda: (x, y))


def by_count(x, y, seeds):
    return x / tf.cast(tf.shape(x)[0], tf.float32), y


def drawn_by_place(x, y, seeds):
    return x + tf.random.stateless_uniform(tf.shape(x), seed=[1, 2]), y


def numbers_like(x):
    """Of NumPy's: what TensorFlow draws is refused in any case."""
    drawn = tf.numpy_function(lambda shape: np.random.normal(size=shape).astype("float32"), [tf.shape(x)], tf.float32)
    return tf.ensure_shape(drawn, x.shape)


def rolled_and_drawn(x, y, seeds):
    return tf.roll(x, 1, 0) + numbers_like(x), y


def scaled(x, y, seeds):
    return x * (1.0 + order.uniform(seeds, 0))[:, None], y


def one_by_one(x, y, seeds):
    return x + tf.map_fn(lambda seed: tf.random.stateless_normal([6], seed), seeds, fn_output_signature=tf.float32), y


def drawn(x, y, seeds):
    """Not as it should be, but it mixes nothing."""
    return x + numbers_like(x), y


def fails(x, y, seeds):
    raise ValueError("no")


def rolled_far(x, y, seeds):
    return 0.7 * x + 0.3 * tf.roll(x, 8, 0), y


def in_groups(x, y, seeds):
    """Fails with fewer than 16 samples."""
    groups = tf.reshape(x, [-1, 16, 6])
    return tf.ensure_shape(tf.reshape(groups - tf.reduce_mean(groups, 1, keepdims=True), tf.shape(x)), x.shape), y


seen: list[int] = []  # numbers of samples


def counted(x, y, seeds):
    seen.append(x.shape[0])
    return x, y


MIXING = (roll, centred, sometimes, rarely, by_count, drawn_by_place, rolled_and_drawn)


def config(function, **changes):
    return Config().replace(augment=f"{HERE}:{function.__name__}", **changes)


@pytest.mark.parametrize("function", MIXING, ids=lambda function: function.__name__)
def test_what_mixes_samples_is_refused_in_parts(function):
    with pytest.raises(ConfigError, match=f"--augment={HERE}:{function.__name__} .*--row_mixing=replica"):
        with_whole_batches_if_it_mixes(config(function), OneDevice(), SPLIT, PARTS)


@pytest.mark.parametrize("function", [roll, rarely, drawn_by_place], ids=lambda function: function.__name__)
def test_what_mixes_samples_has_whole_batches_where_it_is_allowed(function):
    for allowed, plan in ((config(function), WHOLE), (config(function, row_mixing="replica"), PARTS)):
        assert SPLIT.cheap and not with_whole_batches_if_it_mixes(allowed, OneDevice(), SPLIT, plan).cheap


@pytest.mark.parametrize("function", [rolled_far, in_groups], ids=lambda function: function.__name__)
@pytest.mark.parametrize("plan", [BatchPlan(32, 2, 1), BatchPlan(32, 8, 1)], ids=["as a part", "as a batch"])
def test_what_shows_with_many_samples_alone_is_refused(function, plan):
    with pytest.raises(ConfigError, match=f"--augment={HERE}:{function.__name__} .*--row_mixing=replica"):
        with_whole_batches_if_it_mixes(config(function), OneDevice(), SPLIT, plan)


@pytest.mark.parametrize("function", [scaled, one_by_one, drawn, fails], ids=lambda function: function.__name__)
def test_what_does_not_is_left_alone(function):
    """With few samples, a micro-batch of them, and more."""
    assert with_whole_batches_if_it_mixes(config(function), OneDevice(), SPLIT, BatchPlan(32, 2, 1)) is SPLIT


def test_a_slow_one_is_tried_with_a_micro_batch_at_most(monkeypatch):
    seen.clear()
    for limit_s, most in ((600.0, 32), (0.0, 16)):
        monkeypatch.setattr(mixing_augmentation, "_SLOW_S", limit_s)
        with_whole_batches_if_it_mixes(config(counted), OneDevice(), SPLIT, BatchPlan(32, 2, 1))
        assert max(seen) == most
        seen.clear()


def test_that_it_was_tried_is_not_missed():
    tf.random.set_seed(5)
    tf.random.normal([3])
    second = tf.random.normal([3])
    tf.random.set_seed(5)
    tf.random.normal([3])
    with_whole_batches_if_it_mixes(config(drawn, seed=5), OneDevice(), SPLIT, PARTS)
    np.testing.assert_array_equal(tf.random.normal([3]), second)


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_one_device_mixes_what_it_trains_on_together(threads):
    """As a plain loop over batches would."""
    split = with_whole_batches_if_it_mixes(config(roll), OneDevice(), SPLIT, WHOLE)
    reading = Reading(0, False, load_augmentation(f"{HERE}:roll"), threads)
    found = input_pipeline.train_dataset(split, reading, plan=BatchPlan(8, 1, 1), replica=0, consumed=0)
    for first, (x, y, _) in zip(range(0, 48, 8), found.take(6), strict=True):
        expected = roll(X[first : first + 8], X[first : first + 8, :2], None)
        np.testing.assert_allclose(x, expected[0], atol=1e-6)
        np.testing.assert_allclose(y, expected[1], atol=1e-6)
