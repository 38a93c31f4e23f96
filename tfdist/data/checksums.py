"""Checksums of samples (CRC-32C, which processors compute), and the rows that are looked at where reading all is too
much.
"""

from __future__ import annotations

from collections.abc import Iterable

import google_crc32c
import numpy as np

FULL_BYTES = 2**28
PART_BYTES = 2**26  # read of an array that is larger than that
SAMPLED = 16


def sampled_rows(size: int, count: int = SAMPLED) -> np.ndarray:
    """About `count` of the rows 0..size-1, int64, the ends among them, the same in every process."""
    drawn = np.random.default_rng(size).integers(0, size, max(0, count - 3))
    return np.unique(np.concatenate([[0, min(1, size - 1), size - 1], drawn])).astype(np.int64)


def checksum(array: np.ndarray) -> int:
    """The CRC-32C of all bytes of an array (also of strings), or of a part of its rows if it is large."""
    if array.nbytes > FULL_BYTES and array.ndim:
        array = array[sampled_rows(len(array), PART_BYTES // max(1, array.nbytes // len(array)))]
    if array.dtype == object:
        return checksum_of(value if isinstance(value, bytes) else str(value).encode() for value in array.ravel())
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    flat.flags.writeable = False  # else the function refuses it
    return google_crc32c.value(flat)


def checksum_of(pieces: Iterable[bytes]) -> int:
    """The CRC-32C of pieces of bytes, and of where each of them ends."""
    crc = 0
    for piece in pieces:
        crc = google_crc32c.extend(crc, len(piece).to_bytes(8, "little") + piece)
    return crc
