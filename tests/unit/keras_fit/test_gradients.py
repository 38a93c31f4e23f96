"""The part of a gradient that each worker finds, and what makes it whole again, in every type."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.keras_fit.gradients import _seed


@pytest.mark.parametrize("workers", [2, 3, 5, 7])
def test_in_float64_the_parts_make_up_the_whole(workers):
    found = _seed(tf.constant(0.0, tf.float64), None, 1.0 / workers)
    assert found.dtype == tf.float64 and abs(float(found) * workers - 1.0) < 1e-15


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_in_half_precision_only_the_parts_are_rounded_and_not_their_share(dtype):
    given = tf.constant(np.linspace(1.0, 2.0, 1000), dtype)
    found = tf.cast(_seed(given, given, 1.0 / 3.0), tf.float64)
    expected = tf.cast(tf.cast(tf.cast(given, tf.float64) / 3.0, dtype), tf.float64)
    np.testing.assert_array_equal(found, expected)
