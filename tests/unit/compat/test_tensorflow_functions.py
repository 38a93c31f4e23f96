"""Functions that are computed where they are called, and keep nothing of it."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from tfdist.compat.tensorflow_functions import always_traced, functions_inline


class Holder:
    """Two functions, each with an `if` on a tensor."""

    def __init__(self):
        self.attribute = tf.function(self.plain)

    def plain(self, x):
        if tf.reduce_sum(x) > 0:
            x = 2 * x
        return x + 1

    @tf.function
    def method(self, x):
        if tf.reduce_sum(x) > 0:
            x = 2 * x
        return x + 1


@pytest.mark.parametrize("name", ["attribute", "method"])
@pytest.mark.parametrize("in_graph", [False, True])
def test_a_function_computes_the_same_and_keeps_nothing(name, in_graph):
    function = getattr(Holder(), name)
    outer = tf.function(lambda x: function(x), autograph=False)
    with functions_inline():
        run = outer.get_concrete_function(tf.TensorSpec([2])) if in_graph else function
        assert [*run(tf.constant([1.0, 2.0])).numpy(), *run(tf.constant([-1.0, -2.0])).numpy()] == [3.0, 5.0, 0.0, -1.0]
    assert function.experimental_get_tracing_count() == 0
    function(tf.constant([1.0, 2.0]))
    assert function.experimental_get_tracing_count() == 1


def test_arrays_become_tensors_as_ever():
    seen = []
    function = tf.function(lambda x: seen.append(type(x)) or x)
    with functions_inline():
        function(np.ones(2, np.float32))
    assert issubclass(seen[0], tf.Tensor)


def test_what_is_always_traced_and_other_threads_are_as_ever():
    traced, other = always_traced(lambda x: x + 1), tf.function(lambda x: x + 1)
    with functions_inline():
        traced(tf.constant(1))
        thread = threading.Thread(target=other, args=(tf.constant(1),))
        thread.start()
        thread.join()
    assert traced.experimental_get_tracing_count() == other.experimental_get_tracing_count() == 1
