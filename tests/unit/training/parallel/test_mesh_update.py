"""What several workers have whole gets one gradient, whatever order each of them adds up in."""

from types import SimpleNamespace
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.runtime.collectives import Group
from tfdist.runtime.mesh import REPLICA_AXES, Mesh
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


@pytest.mark.parametrize(
    "degrees, in_order",
    [
        # The gradient of a weight that is whole, that two stages hold, that is cut along `model`, along `expert`; the
        # sums of a step; the norm.
        ({"data": 3, "pipe": 2}, [False, True, False, False, True, False]),
        ({"data": 3, "model": 2}, [True, True, False, True, True, False]),
        ({"data": 3, "expert": 2, "model": 2}, [True, True, False, True, True, True]),
        ({"data": 3, "expert": 2}, [False] * 6),
        ({"data": 2, "model": 4}, [False, False, False, False, False, True]),
        ({"data": 2, "pipe": 2, "model": 2}, [False, False, False, False, False, True]),
        ({"data": 4}, [False] * 6),
        ({"model": 4}, [False] * 6),
    ],
    ids=str,
)
def test_copies_of_a_weight_in_other_groups_get_sums_of_the_same_order(degrees, in_order, monkeypatch):
    asked = []
    monkeypatch.setattr(Group, "meet", lambda group, timeout: None)
    monkeypatch.setattr(Group, "all_reduce", lambda group, x: asked.append(group) or x)
    mesh = Mesh.create(**degrees)
    cluster = SimpleNamespace(task=lambda rank: f"/job:worker/replica:0/task:{rank}")
    runtime = MeshRuntime(mesh, cluster, SimpleNamespace(rank=0, size=mesh.size, uses_nccl=False), 1.0)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(6), keras.layers.Dense(3)])
    whole, tied, cut, expert = map(id, model.trainable_variables)
    stages = {whole: (0,), tied: (0, 1) if mesh.degree("pipe") > 1 else (0,), cut: (0,), expert: (0,)}
    parts = {cut: "model", expert: "expert"}
    update = MeshUpdate(runtime, model, keras.optimizers.SGD(0.1), Placement(parts=parts, stages=stages))
    gradients = [tf.ones(variable.shape) for variable in model.trainable_variables]

    update.reduce_gradients(gradients)
    assert {(group.ranks, group.adds_in_order) for group in asked} == {
        (group.ranks, group.adds_in_order) for group in update.groups
    }
    del asked[:]
    update.norm(gradients)
    update.reduce(gradients, tf.zeros([2]), tf.zeros([1]))
    runtime.all_reduce([tf.zeros([])])
    norm, of_sums, *_, once_more = asked
    assert (once_more.ranks, once_more.adds_in_order) == (of_sums.ranks, of_sums.adds_in_order)
    assert of_sums.ranks == mesh.group(0, *REPLICA_AXES)
    assert [group.adds_in_order for group in [*update.groups, of_sums, norm]] == in_order
    hosts = runtime.hierarchical(update.groups[1], 1)
    assert hosts.across.adds_in_order == in_order[1]
