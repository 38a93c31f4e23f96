"""Measuring on the simplest runtime there is: rounds are made, results are checked."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.communication.measure import measure
from tfdist.runtime.one_device import OneDevice
from tfdist.runtime.operations import Collective


def test_every_round_is_made_and_sizes_that_round_to_the_same_are_one():
    calls = []

    def counted(x):
        tf.py_function(lambda: calls.append(1), [], [])
        return tf.identity(x)

    lines = []
    ((small, large),) = measure(
        OneDevice(), {"all_reduce": Collective("nothing", counted)}, [4, 5, 1024], 2, lines.append
    )
    assert (small.size, large.size, small.members) == (4, 1024, 1) and small.seconds > 0
    assert len(calls) >= 2 * (2 + 3 + 2 * 1) and lines[0].startswith("all_reduce (1 of 1): 2 sizes")


@pytest.mark.parametrize(
    "collective", [Collective("x", in_graph=lambda x: 2 * x), Collective("x", on_host=lambda x: np.zeros_like(x))]
)
def test_a_wrong_result_is_an_error(collective):
    with pytest.raises(RuntimeError, match="all_reduce of 4 elements over 1 members gave"):
        list(measure(OneDevice(), {"all_reduce": collective}, [16], 1, print))
