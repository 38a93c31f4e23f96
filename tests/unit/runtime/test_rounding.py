"""Whether workers hold the same numbers."""

import types

import ml_dtypes
import numpy as np
import pytest

from tfdist.runtime.array_bytes import to_bytes
from tfdist.runtime.ring.control_ring import ControlRing
from tfdist.runtime.ring.ring_error import RingError
from tfdist.runtime.rounding import are_same

RNG = np.random.default_rng(0)
HALVES = [np.float16, ml_dtypes.bfloat16]


def same(one, other):
    one, other = np.asarray(one), np.asarray(other)
    results = {are_same([left], right.tobytes()) for left, right in ((one, other), (other, one))}
    assert len(results) == 1  # both workers find the same
    return results.pop()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_order_of_a_sum_makes_no_difference(dtype, scale):
    a, b, c, d = ((scale * RNG.normal(size=2000)).astype(dtype) for _ in range(4))
    one, other = a + (b + c + d), (a + b) + (c + d)
    assert (one != other).any() and same(one, other) and same(one, one)
    for half in HALVES:
        rounded = one.astype(half), other.astype(half)
        assert same(*rounded)


@pytest.mark.parametrize("dtype", [np.float32, *HALVES])
def test_other_numbers_do(dtype):
    one = RNG.normal(size=1000).astype(np.float32)
    for other in (
        one[::-1],
        1.05 * one,
        one + 0.05,
        one + 0.03 * RNG.normal(size=1000),
        one + 0.003 * RNG.normal(size=1000),
        np.zeros(1000),
        np.where(np.arange(1000) == 7, one + 1, one),
        one[:999],
    ):
        assert not same(one.astype(dtype), np.asarray(other).astype(dtype))


def test_one_large_column_hides_nothing():
    table = RNG.normal(size=(100, 9)).astype(np.float32)
    table[:, 0] = 1.7e9
    rolled = np.hstack([table[:, :1], np.roll(table[:, 1:], 1, 0)])
    assert not same(table.ravel(), rolled.ravel())
    assert not same(table[:, 1:].ravel() + np.float32(1e4), table[:, 1:].ravel() + np.float32(1e4 + 0.1))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_beside_those_that_are_none(value):
    one = RNG.normal(size=100)
    one[3] = value
    other = one.copy()
    other[3] = 1.0
    assert same(one, one) and not same(one, other) and not same(one, 2 * one) and not same(one, -one)
    assert not same(one, np.roll(one, 1))


def test_whole_numbers_and_nothing():
    assert same(np.arange(5), np.arange(5)) and not same(np.arange(5), np.arange(5) + (np.arange(5) == 4))
    assert same([True, False], [True, False]) and not same([True, False], [True, True])
    assert same(np.zeros(0), np.zeros(0)) and same(np.zeros(3), np.zeros(3)) and are_same([], b"")


def gathered(ours, theirs):
    """What worker 0 of two finds, which hold these arrays, and how often they met."""
    own, other, met = ControlRing.__new__(ControlRing), ControlRing.__new__(ControlRing), []
    own._ring = types.SimpleNamespace(rank=0)

    def both(data, name, stamp=0):
        said = []
        other.gather = lambda data, *_: said.append(data) or [data]
        other.gather_batches([np.arange(3)], same=theirs, stamp=0)  # its first gather
        met.append(name)
        return [data, said[0] if len(met) == 1 else to_bytes(theirs)]

    own.gather = both
    return [bytes(block) for block in own.gather_batches([np.arange(3)], same=ours, stamp=0)], len(met)


def test_workers_look_closer_only_where_their_checksums_differ():
    one, plain = RNG.normal(size=100), [np.arange(3).tobytes()] * 2
    assert gathered([one], [one.copy()]) == (plain, 1)
    assert gathered([one], [one * (1 + 1e-15)]) == (plain, 2)
    with pytest.raises(RingError, match="Rank 0 and rank 1 have different batches"):
        gathered([one, np.arange(4)], [one, np.arange(4) + 1])
    with pytest.raises(RingError, match="Rank 0 and rank 1 have different batches"):
        gathered([one], [one * 1.001])
