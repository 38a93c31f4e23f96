"""What workers send the chief of a synchronous batch: gradients and states of several types, and what comes of them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.unit.training.parameter_server.test_parameters import call, make_job, make_step
from tfdist.control.exit_codes import DivergedError
from tfdist.training.optimizer import make_optimizer
from tfdist.training.parameter_server.slice_values import SliceValues

ABOVE = 2**24 + 1  # whole numbers that float32 does not hold begin here
WHOLE = [ABOVE, 2**25 + 3, 2**40 + 1, -7]


class Kept(keras.layers.Layer):
    """States of many types: a table and a frozen weight, which nobody sets, and what every training step sets."""

    def build(self, shape):
        def state(name, value, dtype):
            constant = keras.initializers.Constant(0)
            variable = self.add_weight(
                shape=np.shape(value), dtype=dtype, trainable=False, name=name, initializer=constant
            )
            variable.assign(np.array(value, dtype))
            return variable

        self.table = state("table", WHOLE, "int64")
        self.third = state("third", [1 / 3], "float32")
        self.seen = state("seen", 2**24, "int64")
        self.odd = state("odd", False, "bool")
        self.fine = state("fine", 1 / 3, "float64")
        self.mean = state("mean", [0.0] * shape[-1], "float32")

    def call(self, x, training=False):
        if training:
            self.seen.assign_add(1)
            self.odd.assign(keras.ops.logical_not(self.odd))
            self.fine.assign(self.fine * 1.1)
            self.mean.assign(0.5 * self.mean + 0.5 * keras.ops.mean(x, 0))
        return x


class Histogram(keras.layers.Layer):
    """Counts rows in a whole number."""

    def build(self, shape):
        self.rows = self.add_weight(shape=(), dtype="int32", trainable=False, name="rows", initializer="zeros")

    def call(self, x, training=False):
        if training:
            self.rows.assign_add(keras.ops.sum(keras.ops.cast(x[:, 20] > 0.5, "int32")))
        return x


def job_with(layer, **changes):
    job = make_job(optimizer="sgd", **changes)
    job.model = keras.Sequential(
        [keras.Input((8, 8, 1)), keras.layers.Flatten(), layer, keras.layers.Dense(10, dtype="float32")]
    )
    job.optimizer = make_optimizer(job.config.optimizer, job.schedule)
    job.optimizer.build(job.model.trainable_variables)
    return job


def steps(step, count, slices):
    for number in range(count):
        results = [call(step, step.differentiate, number, number * 24, place) for place in range(slices)]
        step.apply(step.combine(results), 48.0, 24.0)
    step.parameters.pull(count)


@pytest.mark.slow
def test_states_of_every_type_are_those_of_one_process():
    """Two slices, and accumulation, so that the states go through a loop, too."""
    job = job_with(Kept(), accumulation=3)
    step = make_step(job, slices=2)
    steps(step, 3, 2)
    kept = job.model.layers[1]
    assert kept.table.numpy().tolist() == WHOLE and kept.third.numpy() == np.float32(1 / 3)
    assert int(kept.seen) == 2**24 + 9 and bool(kept.odd.numpy())
    fine = 1 / 3  # of Python, in float64
    for _ in range(9):
        fine *= 1.1
    assert float(kept.fine) == pytest.approx(fine, rel=1e-15) and np.any(kept.mean.numpy())
    assert [spec.dtype for spec in step._values.specs()] == [tf.float32, tf.int64, tf.bool, tf.float64]
    assert step._values.specs()[1].shape == [1]  # the table stays where it is


def test_whole_numbers_that_differ_end_the_run():
    step = make_step(job_with(Histogram()), slices=2)
    with pytest.raises(DivergedError, match=r"At step 1 the workers came to different values of .*rows \(int32\): "):
        steps(step, 1, 2)


def test_what_one_worker_counts_is_kept():
    job = job_with(Histogram())
    steps(make_step(job), 2, 1)
    assert int(job.model.layers[1].rows) > 0


def variable(dtype, count=2):
    return keras.Variable(np.zeros(count), dtype=dtype, trainable=False)


def test_gradients_are_summed_and_states_averaged_each_in_its_type():
    """In float32 by the order of the slices; in float64 with all its digits."""
    weights, states = [variable("float32"), variable("float64")], [variable("bfloat16"), variable("float64")]
    values = SliceValues(weights, states)
    values.note([0, 0], [1, 1])
    fine = 1 + 2.0**-40
    parts = [
        [tf.constant([1e8, 1.0]), tf.constant([fine, 0.0], tf.float64)],
        [tf.constant([4.0, 1.0]), tf.constant([fine, 0.0], tf.float64)],
        [tf.constant([4.0, 1.0]), tf.constant([0.0, 1.0], tf.float64)],
    ]
    found = [[tf.constant([1.0, 2.0], tf.bfloat16), tf.constant([0.1, float(place)], tf.float64)] for place in range(3)]
    sent = [
        tuple(each.numpy() for each in values.packed(part, state)) for part, state in zip(parts, found, strict=True)
    ]
    gradients, averaged = values.unpacked([tf.constant(each) for each in values.combined(sent, 1)])
    assert gradients[0].numpy().tolist() == [float(np.float32(1e8) + np.float32(4) + np.float32(4)), 3.0]
    assert gradients[1].numpy().tolist() == [2 * fine, 1.0]
    assert averaged[0].numpy().tolist() == [1.0, 2.0] and averaged[1].numpy().tolist() == [0.1, 1.0]


def test_what_no_layer_sets_does_not_travel():
    values = SliceValues([variable("float32")], [variable("int64"), variable("float32", 1000)])
    same, other = object(), object()
    values.note([same, same], [same, same])
    values.note([same, same], [other, same])
    assert values.set_places == {0}
    assert [(spec.dtype, spec.shape) for spec in values.specs()] == [(tf.float32, [2]), (tf.int64, [2])]
