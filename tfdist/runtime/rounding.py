"""Whether two workers hold the same numbers, up to the order in which sums were taken.

Of what each worker computes for itself bits may differ: Grappler makes one sum of x + (a + b + c), and takes its terms
in another order in another process (seen where TensorFlow does not know all dims).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_ROUNDINGS = 64  # of a number, that may differ
_HALVES = {"float16": 2.0**-10, "bfloat16": 2.0**-7}  # -> the largest step from a number to the next, in parts of it
_STEPPED = 0.02  # the part of numbers in half precision that may be one step apart


def are_same(own: Sequence[np.ndarray], other: bytes | memoryview) -> bool:
    """Whether the arrays whose bytes are `other` hold the numbers of `own`. Both workers find the same."""
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
    # A number near 0 may be what is left of terms as large as most others.
    usual = np.median(size[size > 0]) if size.any() else 0.0
    rounding = _ROUNDINGS * np.finfo(np.float32 if half else one.dtype).eps
    if half:  # of what was summed in float32; rounded to these it seldom changes
        near = apart <= half * size + rounding * usual
        return bool(near.all() and (apart > 0).sum() <= max(2, _STEPPED * a.size))
    return bool((apart <= rounding * np.maximum(size, usual)).all())
