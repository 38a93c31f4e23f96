"""Objects that are kept on a model."""

import keras

from tfdist.compat.kept_attributes import kept_on


def test_an_object_is_made_once_for_each_model_and_purpose():
    models = [keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]) for _ in range(2)]
    first = kept_on(models[0], "_kept", dict)
    first["layer"] = keras.layers.Dense(3)
    assert kept_on(models[0], "_kept", dict) is first
    assert kept_on(models[1], "_kept", dict) is not first
    assert len(models[0].layers) == 1, "Keras has tracked it"
    later = kept_on(models[0], "_kept", dict, made_for="another compile")
    assert later == {} and kept_on(models[0], "_kept", dict, made_for="another compile") is later
