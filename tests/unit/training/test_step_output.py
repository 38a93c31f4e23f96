"""What a call of the step gives back: from the sums inside the tf.function to named numbers."""

import math
import re

import numpy as np
import pytest
import tensorflow as tf

from tfdist.telemetry.phases import Call
from tfdist.training.step_output import NOTHING, Requests, StepLayout, Totals, shown_sums

LAYOUT = StepLayout(("accuracy",), workers=2)


def one_step(loss, weight, regularization, signals, **others):
    """As the step makes them, of sums over replicas."""
    sums = shown_sums(LAYOUT, tf.constant([loss, weight, regularization, 1.0]))
    fields = {"gradient_norm": 2.0, "compute_s": tf.constant(0.5, tf.float64), "skipped": 0, "bad": False} | others
    return Totals(tf.cast(tf.concat([sums, signals], 0), tf.float64), **fields)


def output(totals, steps, bad=False):
    vector = totals.vector(LAYOUT, tf.constant(8.0), tf.constant(bad)).numpy()
    return LAYOUT.output(7, vector, Call(steps, 1.0, None, None, travel_s=None))


def test_numbers_of_two_steps_find_their_names():
    signals = LAYOUT.signals_of(0, Requests(save=True), 0.25, 0.125) + LAYOUT.signals_of(1, NOTHING, 9.0, 0.0625)
    first = one_step(6.0, 4.0, 0.5, signals)
    second = one_step(2.0, 4.0, 0.25, signals, gradient_norm=tf.constant(3.0), skipped=1)
    found = output(Totals.of_no_step(LAYOUT).plus(first).plus(second), 2)
    assert found.means == {"loss": 1.0, "regularization": 0.375, "accuracy": 0.25}
    assert found.sums == {"loss": 8.0, "regularization": 3.0, "accuracy": 2.0}
    assert (found.step, found.weight, found.gradient_norm, found.loss_scale, found.skipped) == (7, 8.0, 3.0, 8.0, 1)
    assert found.signals == {"save": True, "stop": False, "leave": False}
    assert found.step_s == 0.25  # the chief's, not that of rank 1
    np.testing.assert_array_equal(found.compute_s, [0.125, 0.0625])
    assert found.finite


def test_times_of_a_worker_with_several_replicas_count_once():
    layout = StepLayout(("accuracy",), workers=2, local_replicas=4)
    found = output(one_step(6.0, 4.0, 0.5, 4 * layout.signals_of(0, Requests(stop=True), 0.25, 0.125)), 1)
    assert found.step_s == 0.25 and found.compute_s[0] == 0.125 and found.signals["stop"]


def test_a_bad_step_or_bad_weights_are_bad():
    signals = LAYOUT.signals_of(0, NOTHING, 0.0, 0.0)
    bad = Totals.of_no_step(LAYOUT).plus(one_step(1.0, 1.0, 0.0, signals, bad=True))
    assert not output(bad.plus(one_step(1.0, 1.0, 0.0, signals)), 2).finite
    assert not output(Totals.of_no_step(LAYOUT).plus(one_step(1.0, 1.0, 0.0, signals)), 1, bad=True).finite


def test_nothing_counted_is_not_a_loss_of_0():
    found = output(Totals.of_no_step(LAYOUT).plus(one_step(0.0, 0.0, 0.0, LAYOUT.signals_of(0, NOTHING, 0, 0))), 1)
    assert math.isnan(found.means["loss"]) and "regularization" not in found.means


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (-math.inf, "--objective gave negative weights between step 3 and 7"),
        (math.nan, "became NaN .* between step 3 and 7 .*nan"),  # as where a row of a table is missing
    ],
)
def test_why_a_run_ends(weight, words):
    step = one_step(math.nan, weight, 0.0, LAYOUT.signals_of(0, NOTHING, 0.25, 0.125), gradient_norm=1.0)
    found = output(Totals.of_no_step(LAYOUT).plus(step), 1, bad=True)
    assert not found.finite and re.search(words, found.why_not_finite(3))


@pytest.mark.parametrize(
    ("loss", "on_nan", "sentence"),
    [
        (
            2.5,
            "skip",
            "A gradient or a weight, though not the loss, became NaN or infinite between step 3 and 7 (loss 2.5): lower"
            " --learning_rate, set --clip_norm, or use --on_nan=rollback.",
        ),
        (
            math.inf,
            "stop",
            "Loss, gradients or weights became NaN or infinite between step 3 and 7 (loss inf): lower --learning_rate,"
            " set --clip_norm, or use --on_nan=skip or --on_nan=rollback.",
        ),
    ],
)
def test_what_is_advised_is_not_set_yet(loss, on_nan, sentence):
    found = output(one_step(loss, 1.0, 0.0, LAYOUT.signals_of(0, NOTHING, 0.25, 0.125)), 1, bad=True)
    assert found.why_not_finite(3, on_nan) == sentence
