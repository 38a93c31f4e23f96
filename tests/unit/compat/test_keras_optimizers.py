"""Optimizers of Keras from inside."""

import keras
import numpy as np

from tfdist.compat.keras_optimizers import built_with_slots, weights_that_decay


def test_each_slot_is_known_by_its_variable_and_keras_own_method_is_put_back():
    weights = [keras.Variable([1.0, 2.0], name="first"), keras.Variable([3.0], name="second")]
    optimizer = keras.optimizers.Adam()
    slots = built_with_slots(optimizer, weights)
    assert [(variable.name, name) for _, variable, name in slots] == [
        (weight.name, name) for weight in weights for name in ("momentum", "velocity")
    ]
    assert {id(slot) for slot, _, _ in slots} < {id(variable) for variable in optimizer.variables}
    assert "add_variable_from_reference" not in vars(optimizer)


def test_asking_which_weights_decay_changes_no_answer():
    """Keras asks with TensorFlow's variable, which is named by its path, and keeps the first answer."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="head_a"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(1.0, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["head_a"])
    weights = model.trainable_variables
    assert weights_that_decay(optimizer, weights) == [[2, 3]]
    before = [weight.numpy() for weight in weights]
    optimizer.apply([keras.ops.zeros(weight.shape) for weight in weights], weights)
    for weight, value, factor in zip(weights, before, (1, 1, 0.5, 0.5), strict=True):
        np.testing.assert_allclose(weight, factor * value)
