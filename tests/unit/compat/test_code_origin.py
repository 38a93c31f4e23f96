"""Whose code something is (tfdist/compat/code_origin.py)."""

import functools

import keras

from tfdist.compat.code_origin import is_of_keras, module_of, package_of


class Own(keras.layers.Dense):
    pass


def test_of_keras_are_its_own_classes_alone():
    assert is_of_keras(keras.layers.Dense(1)) and is_of_keras(keras.metrics.Mean())
    assert not is_of_keras(Own(1)) and not is_of_keras(len)


def test_a_function_is_of_its_module_and_an_object_of_its_class():
    assert module_of(keras.activations.relu).startswith("keras.")
    assert module_of(Own) == module_of(Own(1)) == module_of(lambda: None) == __name__
    assert module_of(functools.partial(len)) == "functools"
    exec("def f(): pass", made := {})  # by a program, which gives it no module
    assert module_of(made["f"]) == "builtins"


def test_the_package_is_the_first_part_alone():
    assert package_of("keras.src.layers") == package_of("keras") == "keras"
    assert package_of("keras_hub.layers") == "keras_hub" and package_of(None) == package_of("") == ""
