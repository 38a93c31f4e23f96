"""Whether workers hold the same numbers, up to the order in which sums were taken.

Of what each worker computes for itself bits may differ: Grappler makes one sum of x + (a + b + c), and takes its terms
in another order in another process (seen where TensorFlow does not know all dims). Checksums would call that other
data.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

_DOTS = 4
_LEAST = 1e-5  # of the norm, that may differ
_ROUNDINGS = 4  # in half precision


def sketch_of(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """float64 [1 + dots]: the norm of all floating numbers together, and their products with a few random vectors."""
    values = [np.ravel(array).astype(np.float64) for array in arrays if is_floating(array)]
    joined = np.concatenate([*values, np.zeros(0)])
    return np.concatenate([[np.linalg.norm(joined)], _vectors(joined.size) @ joined])


def are_alike(one: np.ndarray, other: np.ndarray, tolerance: float) -> bool:
    """Whether two sketches are of the same numbers. Both workers find the same."""
    if np.isnan(one).any() or np.isnan(other).any():
        return bool(np.isnan(one).any() and np.isnan(other).any())
    if np.isinf(one).any() or np.isinf(other).any():
        return bool((np.isinf(one) == np.isinf(other)).all())
    return bool(np.abs(one - other).max() <= 4 * tolerance * max(one[0], other[0]))


def tolerance_of(arrays: Sequence[np.ndarray]) -> float:
    """By how much, in parts of the norm, the same numbers may differ in these dtypes."""
    halves = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
    return max([_LEAST, *(_ROUNDINGS * halves.get(array.dtype.name, 0.0) for array in arrays)])


def is_floating(array: np.ndarray) -> bool:
    """NumPy does not know that bfloat16 is one."""
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"


@functools.cache
def _vectors(size: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((_DOTS, size))
