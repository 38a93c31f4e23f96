"""Whether two workers hold the same numbers, up to the order in which sums were taken.

Bits may differ in values that each worker computes for itself: Grappler makes one sum of x + (a + b + c), and takes its
terms in another order in another process (seen where TensorFlow does not know all dims).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_ROUNDINGS = 64  # allowed difference, in rounding errors of a number
_HALVES = {"float16": 2.0**-10, "bfloat16": 2.0**-7}  # -> the largest relative step from a number to the next
_STEPPED = 0.02  # the fraction of numbers in half precision that may be one step apart


def are_same(own: Sequence[np.ndarray], other: bytes | memoryview) -> bool:
    """Whether the arrays with the bytes `other` hold the numbers of `own`. Both workers get the same answer."""
    if len(other) != sum(array.nbytes for array in own):
        return False
    offset = 0
    for array in own:
        theirs = np.frombuffer(other, array.dtype, array.size, offset)
        offset += array.nbytes
        if not _are_near(np.ravel(array), theirs):
            return False
    return True


def _are_near(one: np.ndarray, other: np.ndarray) -> bool:
    half = _HALVES.get(one.dtype.name)
    if one.dtype.kind != "f" and not half:
        return bool((one == other).all())
    a, b = one.astype(np.float64), other.astype(np.float64)
    finite = np.isfinite(a)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(b[finite]).all():
        return False
    a, b = a[finite], b[finite]
    apart, size = np.abs(a - b), np.maximum(np.abs(a), np.abs(b))
    # A number near 0 may be the difference of terms as large as most other numbers.
    usual = np.median(size[size > 0]) if size.any() else 0.0
    rounding = _ROUNDINGS * np.finfo(np.float32 if half else one.dtype).eps
    if half:  # values summed in float32: rounded to half precision they seldom differ
        near = apart <= half * size + rounding * usual
        return bool(near.all() and (apart > 0).sum() <= max(2, _STEPPED * a.size))
    return bool((apart <= rounding * np.maximum(size, usual)).all())
