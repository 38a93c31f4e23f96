"""What a model is tried with where a trace has no values."""

import numpy as np
import tensorflow as tf

from tfdist.keras_fit.example_batch import ExampleBatch

WHOLE = tf.constant(np.arange(20).reshape(5, 4))


def traced(*specs, cut, known=None):
    """What `like` returns inside a trace for inputs of these specs."""
    example, found = ExampleBatch(), []
    example.inputs = known

    def trace(*tensors):
        with tf.init_scope():
            found.append(example.like(list(tensors), cut))

    tf.function(trace, autograph=False).get_concrete_function(*specs)
    return found[0]


def test_for_some_of_its_rows_the_whole_batch_is_taken():
    for rows in (2, 5, None):
        (found,) = traced(tf.TensorSpec([rows, 4], tf.int64), cut=[True], known=[WHOLE])
        assert found is WHOLE


def test_a_table_beside_the_batch_must_be_as_large():
    specs = tf.TensorSpec([2, 4], tf.int64), tf.TensorSpec([3, 4], tf.int64)
    found = traced(*specs, cut=[True, False], known=[WHOLE, WHOLE])
    assert found[1] is not WHOLE and found[1].shape == (3, 4)


def test_rows_of_whole_numbers_that_are_made_up_differ_however_few_a_worker_has():
    (found,) = traced(tf.TensorSpec([1, 4], tf.int32), cut=[True])
    assert found.shape[0] >= 4 and (found[0].numpy() != found[1].numpy()).all()
