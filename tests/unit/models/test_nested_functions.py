"""Layers whose `call` is a tf.function."""

from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf

from tfdist.config import Config
from tfdist.control.exit_codes import ConfigError
from tfdist.models.nested_functions import refuse_batch_norm, trace_anew
from tfdist.training import composition_checks


class Traced(keras.layers.Layer):
    factor, norm = 1.0, None

    @tf.function
    def call(self, x):
        return x * self.factor if tf.reduce_sum(x) > 0 else x  # which needs AutoGraph


def test_it_keeps_nothing_of_an_earlier_call():
    layer, x = Traced(), tf.ones([2, 3])
    model = keras.Sequential([keras.Input((3,)), layer])
    trace_anew(model)
    assert float(layer(x)[0, 0]) == 1
    layer.factor = 2.0
    assert float(layer(x)[0, 0]) == 2 and float(tf.function(lambda: layer(x))()[0, 0]) == 2
    assert "call" not in vars(model)


def test_batch_normalization_in_it_cannot_meet_other_workers():
    refuse_batch_norm(keras.Sequential([keras.Input((3,)), Traced(), keras.layers.BatchNormalization()]))
    layer = Traced()
    layer.norm = keras.layers.BatchNormalization()
    with pytest.raises(ConfigError, match="remove @tf.function"):
        refuse_batch_norm(keras.Sequential([keras.Input((3,)), layer]))


def test_a_job_is_asked_for_it_on_any_strategy():
    layer = Traced()
    layer.norm = keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((3,)), layer])
    composition_checks.check_model(Config(), SimpleNamespace(replicas=1, size=1), model)
    composition_checks.check_model(Config().replace(sync_batchnorm=False), SimpleNamespace(replicas=2, size=1), model)
    with pytest.raises(ConfigError, match="remove @tf.function"):
        composition_checks.check_model(Config(), SimpleNamespace(replicas=2, size=1), model)
