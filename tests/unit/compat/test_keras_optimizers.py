"""Optimizers of Keras from inside."""

import keras

from tfdist.compat.keras_optimizers import built_with_slots


def test_each_slot_is_known_by_its_variable_and_keras_own_method_is_put_back():
    weights = [keras.Variable([1.0, 2.0], name="first"), keras.Variable([3.0], name="second")]
    optimizer = keras.optimizers.Adam()
    slots = built_with_slots(optimizer, weights)
    assert [(variable.name, name) for _, variable, name in slots] == [
        (weight.name, name) for weight in weights for name in ("momentum", "velocity")
    ]
    assert {id(slot) for slot, _, _ in slots} < {id(variable) for variable in optimizer.variables}
    assert "add_variable_from_reference" not in vars(optimizer)
