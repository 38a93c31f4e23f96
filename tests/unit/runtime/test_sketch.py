"""Whether workers hold the same numbers."""

import ml_dtypes
import numpy as np
import pytest

from tfdist.runtime.sketch import are_alike, sketch_of, tolerance_of


def alike(one, other):
    found, expected = ([np.asarray(array) for array in arrays] for arrays in (one, other))
    results = {
        are_alike(sketch_of(left), sketch_of(right), tolerance_of(left))
        for left, right in ((found, expected), (expected, found))
    }
    assert len(results) == 1  # both workers find the same
    return results.pop()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_order_of_a_sum_makes_no_difference(dtype, scale):
    rng = np.random.default_rng(0)
    a, b, c, d = (scale * rng.normal(size=(1, 700)) for _ in range(4))
    a, b, c, d = (each.astype(dtype) for each in (a, b, c, d))
    one, other = [a + (b + c + d), a[:, :3]], [(a + b) + (c + d), a[:, :3]]
    assert any((left != right).any() for left, right in zip(one, other, strict=True))
    assert alike(one, other) and alike(one, one)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_other_rows_do(dtype):
    rng = np.random.default_rng(0)
    one = rng.uniform(size=(1, 700)).astype(dtype)
    assert not alike([one, one], [one, one[:, ::-1]])
    assert not alike([one], [np.float32(1.3) * one.astype(np.float32)])
    changed = one.copy()
    changed[0, 100] += np.asarray(5.0, dtype)
    assert not alike([one], [changed])
    assert not alike([one], [np.zeros_like(one)]) and alike([np.zeros_like(one)], [np.zeros_like(one)])


def test_what_is_no_number():
    nan, inf, one = (np.array([[1.0, value]]) for value in (np.nan, np.inf, 2.0))
    assert alike([nan], [nan]) and alike([inf], [inf]) and not alike([nan], [one]) and not alike([one], [inf])


def test_nothing_and_whole_numbers():
    assert alike([], []) and alike([np.arange(3)], [np.arange(4)])  # those have a checksum, see ControlRing
