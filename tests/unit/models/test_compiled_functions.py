"""LayerNormalization and GELU that XLA compiles in steps on CPUs, against Keras' own in float64."""

import contextlib
import functools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.gpu.combinations import as_on_gpu
from tfdist.models import compiled_functions
from tfdist.models.compiled_functions import in_steps

SHAPE = (6, 40, 96)


@pytest.fixture(autouse=True)
def installed():
    compiled_functions.compile_functions()


def normalization(dtype, axis=-1):
    rng = np.random.default_rng(1)
    layer = keras.layers.LayerNormalization(axis=axis, epsilon=1e-5, dtype=dtype)
    layer.build(SHAPE)
    layer.set_weights([rng.normal(size=weight.shape) for weight in layer.weights])
    return layer


def activation(approximate):
    return lambda dtype: lambda x: keras.ops.gelu(x, approximate)


FUNCTIONS = {"layer_normalization": normalization, "gelu, tanh": activation(True), "gelu, erf": activation(False)}


def traced(function, inside=True, rows=SHAPE[0], dtype="float32"):
    """(outputs, gradients, and those of their squares), of (x, upstream); and whether XLA compiles something in it."""

    def compute(x, upstream):
        with in_steps() if inside else contextlib.nullcontext(), tf.GradientTape(persistent=True) as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = function(x)
            sources = [x, *(weight.value for weight in getattr(function, "trainable_variables", []))]
            gradients = tape.gradient(y, sources, upstream)
            squares = tf.reduce_sum(gradients[0] ** 2)
        return [y, *gradients, outer.gradient(squares, x)]

    spec = tf.TensorSpec([rows, *SHAPE[1:]], dtype)
    found = tf.function(compute, autograph=False).get_concrete_function(spec, spec)
    return found, any("Partitioned" in operation.type for operation in found.graph.get_operations())


def numbers(dtype="float32"):
    rng = np.random.default_rng(0)
    return [tf.cast(tf.constant(scale * rng.normal(size=SHAPE)), dtype) for scale in (3.0, 1.0)]


@functools.cache
def of_keras(name):
    """The same of Keras' own function, in float32 and in float64."""
    keras_own, _ = traced(FUNCTIONS[name]("float32"), inside=False)
    exact, is_other = traced(FUNCTIONS[name]("float64"), dtype="float64")
    assert not is_other
    return keras_own(*numbers()), exact(*numbers("float64"))


@pytest.mark.parametrize("rows", [SHAPE[0], None])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_gradients_and_theirs_are_as_near_to_those_of_float64_as_kerass(name, rows):
    found, is_compiled = traced(FUNCTIONS[name]("float32"), rows=rows)
    assert is_compiled
    for one, composed, exact in zip(found(*numbers()), *of_keras(name), strict=True):
        off, keras_off = (np.max(np.abs(tf.cast(each, tf.float64) - exact)) for each in (one, composed))
        assert off <= 2 * keras_off + 1e-6 * np.max(np.abs(exact))


@pytest.mark.parametrize("approximate", [True, False])
def test_gelu_of_what_is_no_usual_number_is_kerass(approximate):
    odd = [np.nan, np.inf, 0.0, -0.0, 1e-30, 1e30, -1e30, 6.0, -6.0, -5.4]
    x = tf.constant(np.resize(odd, SHAPE), tf.float32)
    (found, _), (expected, _) = (
        traced(FUNCTIONS["gelu, tanh" if approximate else "gelu, erf"]("float32"), inside) for inside in (True, False)
    )
    for one, other in zip(found(x, tf.ones(SHAPE))[:2], expected(x, tf.ones(SHAPE))[:2], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=5e-7)


@pytest.mark.parametrize("shape", [SHAPE, (SHAPE[0], 1, SHAPE[-1]), (1, SHAPE[-1])])
def test_a_layer_normalization_with_weights_of_another_shape_is_kerass(shape):
    """Such as one that is made of another input, with values for each row."""
    weights = [tf.Variable(np.random.default_rng(2).normal(size=shape), dtype=tf.float32) for _ in range(2)]

    def normalized(x):
        return keras.ops.layer_normalization(x, *(2.0 * weight for weight in weights), epsilon=1e-5)

    normalized.trainable_variables = [types.SimpleNamespace(value=weight) for weight in weights]
    results = [traced(normalized, inside)[0](*numbers()) for inside in (True, False)]
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_elsewhere_it_is_kerass_own():
    layer = normalization("float32")
    assert not traced(layer, inside=False)[1]  # where a model is exported, say
    assert not traced(normalization("float32", axis=1))[1]
    with as_on_gpu():
        assert not traced(layer)[1]  # XLA compiles the whole step there

    @tf.function(jit_compile=True, autograph=False)
    def whole(x):
        with in_steps():
            return layer(x)

    graph = whole.get_concrete_function(tf.TensorSpec(SHAPE)).graph
    assert not any("Partitioned" in operation.type for operation in graph.get_operations())
    with in_steps():
        layer(numbers()[0])  # at once, for a number of rows that may be another one each time
        one = tf.function(lambda x: layer(x), autograph=False)
        spec = tf.TensorSpec([SHAPE[0], None, SHAPE[-1]])
        operations = one.get_concrete_function(spec).graph.get_operations()  # XLA would compile for each length
    assert not any("Partitioned" in operation.type for operation in operations)


def test_the_same_bits_each_time():
    found, _ = traced(normalization("float32"))
    first = found(*numbers())
    for _ in range(5):
        for one, other in zip(found(*numbers()), first, strict=True):
            np.testing.assert_array_equal(one, other)
