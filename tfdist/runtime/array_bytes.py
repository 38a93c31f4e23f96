"""Converts arrays to one sequence of bytes and back, if both sides know their shapes and dtypes (else: encoding.py)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def to_bytes(arrays: Sequence[np.ndarray]) -> bytes:
    """The bytes of all arrays, concatenated."""
    # One copy only, no `tobytes` for each. Viewed as bytes, since types such as bfloat16 do not support buffers.
    return b"".join(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays)


def from_bytes(data: bytes | bytearray | memoryview, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns arrays with the shapes and dtypes of `like`, which own their memory."""
    arrays, offset = [], 0
    for array in map(np.asarray, like):
        arrays.append(np.frombuffer(data, array.dtype, array.size, offset).reshape(array.shape).copy())
        offset += array.nbytes
    return arrays
