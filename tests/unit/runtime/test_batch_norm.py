"""Moments over several workers are those over all rows: values, gradients, and gradients of gradients."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.runtime import batch_norm

PARTS = {"equal": (4, 4), "unequal": (5, 1, 2), "one": (8,)}
AXES = [0, 1]
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(8, 3, 2)) + 2.0
WEIGHTS = RANDOM.normal(size=(8, 3, 2))
MASK = RANDOM.random((8, 3)) < 0.7


class Worker:
    """One of several in this process: `rows` are what all of them hand to gather_row."""

    def __init__(self, rows):
        self.rows, self.own = rows, None

    def gather_row(self, row):
        self.own = row
        return tf.stack(self.rows or [row])


def of_workers(x, sizes, mask, axes=AXES):
    starts = np.cumsum([0, *sizes])
    parts = [slice(start, stop) for start, stop in zip(starts, starts[1:], strict=False)]

    def of(part, rows):
        worker = Worker(rows)
        found = batch_norm.moments(worker, x[part], axes, mask=None if mask is None else tf.constant(mask[part]))
        return worker.own, found

    rows = [of(part, [])[0] for part in parts]
    return of(parts[0], rows)[1]


def of_keras(x, mask, axis=-1):
    if mask is None:
        return tf.nn.moments(x, AXES)
    layer = keras.layers.BatchNormalization(axis=axis)
    layer.build(x.shape)
    return type(layer)._moments(layer, x, tf.constant(mask))


def derivatives(moments):
    """(mean, variance, gradient, gradient of a penalty on the gradient) of a normalization and a cubic loss."""
    x = tf.constant(X)
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            mean, variance = moments(x)
            loss = tf.reduce_sum(WEIGHTS * ((x - mean) / tf.sqrt(variance + 1e-3)) ** 3)
        gradient = inner.gradient(loss, x)
        penalty = tf.reduce_sum(tf.square(gradient))
    return mean, variance, gradient, outer.gradient(penalty, x)


@pytest.mark.parametrize("sizes", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "masked"])
def test_derivatives_of_any_order_are_those_of_one_process(sizes, mask):
    for found, wanted in zip(
        derivatives(lambda x: of_workers(x, sizes, mask)), derivatives(lambda x: of_keras(x, mask)), strict=True
    ):
        # Keras divides masked sums by the count + 1e-7.
        np.testing.assert_allclose(
            found, wanted, rtol=1e-9 if mask is None else 1e-5, atol=1e-9 if mask is None else 1e-5
        )


@pytest.mark.parametrize("sizes", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("nowhere", [0, 1, 2])
def test_each_channel_counts_what_its_mask_lets_through(sizes, nowhere):
    """The channels are what the mask runs along: one may be masked everywhere, another in all rows of a worker."""
    mask = MASK.copy()
    mask[:, nowhere] = False
    mask[:5, (nowhere + 1) % 3] = False
    found, wanted = of_workers(tf.constant(X), sizes, mask, [0, 2]), of_keras(tf.constant(X), mask, axis=1)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, tf.reshape(other, [-1]), rtol=1e-6)
