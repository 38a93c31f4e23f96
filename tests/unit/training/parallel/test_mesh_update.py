"""What ranks of `model` have whole gets one gradient, whatever order each of them adds up in."""

from types import SimpleNamespace
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.runtime.mesh_runtime import MeshRuntime
from tfdist.training.parallel.mesh_update import MeshUpdate, Placement


class _Second:
    """The second of two ranks; the first gives `first` to every sum."""

    size, index = 2, 1
    first = 7.0

    def all_reduce(self, x):
        assert not np.any(x.numpy()), "what this rank has of it must not count"
        return x + self.first


def test_the_first_ranks_gradient_of_what_all_have_whole():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(6), keras.layers.Dense(3)])
    cut, *_ = model.trainable_variables
    runtime = MeshRuntime.create(Config().replace(strategy="mesh"), Cluster())
    group = runtime.group
    with (
        mock.patch.object(tf.config, "list_logical_devices", lambda kind: [SimpleNamespace(name="/device:GPU:0")]),
        mock.patch.object(runtime, "group", lambda *axes: _Second() if axes == ("model",) else group(*axes)),
    ):
        update = MeshUpdate(runtime, model, keras.optimizers.SGD(0.1), Placement(parts={id(cut): "model"}))
    gradients = [tf.ones(variable.shape) for variable in model.trainable_variables]
    reduced, _ = update.reduce(gradients, tf.zeros([2]), tf.zeros([1]))
    assert [float(tf.reduce_mean(each)) for each in reduced] == [1.0, 7.0, 7.0, 7.0]


def test_on_cpus_nothing_travels_for_it():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(6)])
    runtime = MeshRuntime.create(Config().replace(strategy="mesh"), Cluster())
    group = runtime.group
    with mock.patch.object(runtime, "group", lambda *axes: _Second() if axes == ("model",) else group(*axes)):
        update = MeshUpdate(runtime, model, keras.optimizers.SGD(0.1))
    reduced, _ = update.reduce([tf.ones([4, 6]), tf.ones([6])], tf.zeros([2]), tf.zeros([1]))
    assert [float(tf.reduce_mean(each)) for each in reduced] == [1.0, 1.0]
