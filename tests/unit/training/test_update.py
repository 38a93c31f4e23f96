"""Gradients of tables as slices, against the same gradients as tensors."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.runtime.one_device import OneDevice
from tfdist.training.optimizer import switch_off_reduction
from tfdist.training.update import DataParallel, scaled

OPTIMIZERS = {"sgd": lambda: keras.optimizers.SGD(0.1), "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9), "adam": lambda: keras.optimizers.Adam(0.1),
              "decay": lambda: keras.optimizers.SGD(0.1, weight_decay=0.01)}


def make_update(optimizer="sgd", rows=8, replicas=1, slices=True):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input([3], dtype="int32"), keras.layers.Embedding(rows, 2)])
    runtime, rule = OneDevice(), switch_off_reduction(OPTIMIZERS[optimizer]())
    runtime.replicas = replicas
    rule.build(model.trainable_variables)
    return DataParallel(runtime, model, rule, slices)


def gradient(rows=8):
    """Row 1 was looked up twice."""
    return tf.IndexedSlices(tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), tf.constant([1, 5 % rows, 1]), tf.constant([rows, 2]))


@pytest.mark.parametrize("rows, replicas, slices, stays", [(8, 1, True, True), (8, 2, True, True), (8, 3, True, False), (2, 1, True, False), (8, 1, False, False)])
def test_slices_stay_while_they_are_few(rows, replicas, slices, stays):
    (kept,) = make_update(rows=rows, replicas=replicas, slices=slices).keep([gradient(rows)])
    assert isinstance(kept, tf.IndexedSlices) is stays


def test_slices_of_an_unknown_number_become_a_tensor():
    update = make_update()
    kinds = []

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def keep(values):
        kinds.extend(update.keep([tf.IndexedSlices(values, tf.range(tf.shape(values)[0]), tf.constant([8, 2]))]))

    keep(tf.ones([3, 2]))
    assert not isinstance(kinds[0], tf.IndexedSlices)


def test_the_norm_counts_each_row_once():
    assert float(make_update().norm([gradient()])) == pytest.approx(np.linalg.norm([6.0, 8.0, 3.0, 4.0]))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_update_is_that_of_the_tensor(optimizer):
    sparse, dense = make_update(optimizer), make_update(optimizer)
    for _ in range(3):
        sparse.apply([scaled(gradient(), 0.5)])
        dense.apply([0.5 * tf.convert_to_tensor(gradient())])
    np.testing.assert_allclose(sparse.model.get_weights()[0], dense.model.get_weights()[0], rtol=1e-6, atol=1e-7)
