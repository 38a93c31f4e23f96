"""Variables on which the loss does not depend, beside Keras' own update."""

from types import SimpleNamespace

import keras
import numpy as np
import tensorflow as tf

from tfdist.config import Config
from tfdist.training.connected import apply_connected, unconnected
from tfdist.training.objectives import classification
from tfdist.training.optimizer import ema_variables, switch_off_reduction


def test_averages_begin_and_move_where_no_variable_has_a_gradient():
    """As on one device, where Keras updates the averages of all variables with each update of some."""
    used, idle, on_stage = keras.Variable([1.0]), keras.Variable([2.0, 3.0]), keras.Variable([2.0, 3.0])
    of_all, of_stage = (keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5) for _ in range(2))
    of_all.build([used, idle])
    of_stage.build([on_stage])
    for value in ([2.0, 3.0], [4.0, 7.0]):
        for variable in (idle, on_stage):
            variable.assign(value)
        apply_connected(of_all, [tf.constant([1.0]), None], [used, idle])
        apply_connected(of_stage, [None], [on_stage])
    (found,) = ema_variables(of_stage)
    np.testing.assert_array_equal(found, [3.0, 5.0])
    np.testing.assert_array_equal(found, ema_variables(of_all)[1])
    assert of_stage.iterations.numpy() == of_all.iterations.numpy() == 2


def test_averages_of_replicas_begin_too():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        weight = keras.Variable([2.0, 3.0])
        optimizer = switch_off_reduction(keras.optimizers.SGD(0.1, use_ema=True))
        optimizer.build([weight])
    strategy.run(tf.function(lambda: apply_connected(optimizer, [None], [weight])))
    np.testing.assert_array_equal(ema_variables(optimizer)[0].numpy(), [2.0, 3.0])


def test_without_averages_it_is_an_update_all_the_same():
    weight = keras.Variable([2.0])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([weight])
    apply_connected(optimizer, [None], [weight])
    assert optimizer.iterations.numpy() == 1 and ema_variables(optimizer) == []


def test_layers_keep_nothing_of_the_trace_that_looks_for_them():
    class Once(keras.layers.Dense):
        made = None

        def call(self, x):
            if self.made is None:
                self.made = tf.fill([1], 2.0)
            return super().call(x) + self.made

    own = Once(2)
    idle, model = own.add_weight(shape=()), keras.Sequential([keras.Input((3,)), own])
    own.made = None
    config = Config().replace(recompute="blocks", model="own:model")
    spec = tf.TensorSpec([4, 3]), tf.TensorSpec([4], tf.int32), tf.TensorSpec([4])
    found = unconnected(config, SimpleNamespace(mesh=None), model, classification(), spec)
    assert [one is idle for one in found] == [True] and own.made is None
