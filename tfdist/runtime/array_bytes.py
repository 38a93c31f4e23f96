"""Arrays as one row of bytes, and back, where both sides know their shapes and types (encoding.py is for the rest)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def to_bytes(arrays: Sequence[np.ndarray]) -> bytes:
    """The bytes of all arrays, one after the other."""
    # Copied once; no `tobytes` of each before. As bytes, since types such as bfloat16 are no buffers.
    return b"".join(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays)


def from_bytes(data: bytes | bytearray | memoryview, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Arrays of the shapes and types of `like`, with memory of their own."""
    arrays, offset = [], 0
    for array in map(np.asarray, like):
        arrays.append(np.frombuffer(data, array.dtype, array.size, offset).reshape(array.shape).copy())
        offset += array.nbytes
    return arrays
