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


def test_threads_may_leave_in_another_order_than_they_entered():
    """As replicas do, which wait for each other inside."""
    function, inside, one_left = tf.function(lambda x: x + 1), threading.Barrier(2), threading.Event()
    counts = []

    def replica(first):
        with functions_inline():
            inside.wait(10)
            if not first:
                one_left.wait(10)
            function(tf.constant(1))
            counts.append(function.experimental_get_tracing_count())
        one_left.set()

    threads = [threading.Thread(target=replica, args=(first,)) for first in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [0, 0]
    function(tf.constant(1))
    assert function.experimental_get_tracing_count() == 1


@tf.function(input_signature=[tf.TensorSpec([None]), tf.TensorSpec([])])
def scaled(x, factor):
    assert factor.dtype == tf.float32
    return {"scaled": x * factor, "two": 2, "three": np.float32(3)}


@pytest.mark.parametrize("factor", [0.5, np.float32(0.5), np.array(0.5)])
@pytest.mark.parametrize("by_name", [False, True])
def test_what_a_function_takes_and_gives_are_tensors_as_ever(factor, by_name):
    given = {"factor": factor} if by_name else {}
    with functions_inline():
        found = scaled([1.0, 2.0], *([] if by_name else [factor]), **given)
    assert all(isinstance(each, tf.Tensor) for each in found.values())
    assert found["scaled"].numpy().tolist() == [0.5, 1.0]


def test_what_has_drawn_is_computed_in_place_with_the_seeds_of_here():
    drawing, other = tf.function(lambda x: x + tf.random.normal([])), tf.function(lambda x: x + 1)
    for function in (drawing, other):
        function(tf.constant(1.0))
    with functions_inline(drawing=True):
        graph = tf.function(lambda x: drawing(other(x)), autograph=False).get_concrete_function(tf.constant(1.0)).graph
    kinds = [operation.type for operation in graph.get_operations()]
    assert "RandomStandardNormal" in kinds and len([kind for kind in kinds if "PartitionedCall" in kind]) == 1
