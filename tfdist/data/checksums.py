"""Checksums of samples (CRC-32C, which processors compute in hardware), and the choice of rows to check where reading
all of them would take too long.
"""

from __future__ import annotations

from collections.abc import Iterable

import google_crc32c
import numpy as np

FULL_BYTES = 2**28
PART_BYTES = 2**26  # how much is read of an array larger than FULL_BYTES
SAMPLED = 16


def sampled_rows(size: int, count: int = SAMPLED) -> np.ndarray:
    """Returns about `count` of the rows 0..size-1 (int64), including both ends; the same in every process."""
    drawn = np.random.default_rng(size).integers(0, size, max(0, count - 3))
    return np.unique(np.concatenate([[0, min(1, size - 1), size - 1], drawn])).astype(np.int64)


def checksum(array: np.ndarray) -> int:
    """Returns the CRC-32C of all bytes of an array (strings, too), or of a part of its rows if the array is large."""
    if array.nbytes > FULL_BYTES and array.ndim:
        array = array[sampled_rows(len(array), PART_BYTES // max(1, array.nbytes // len(array)))]
    if array.dtype == object:
        return checksum_of(value if isinstance(value, bytes) else str(value).encode() for value in array.ravel())
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    flat.flags.writeable = False  # google_crc32c refuses writable buffers
    return google_crc32c.value(flat)


def checksum_of(pieces: Iterable[bytes]) -> int:
    """Returns the CRC-32C of pieces of bytes; where each piece ends counts, too."""
    crc = 0
    for piece in pieces:
        crc = google_crc32c.extend(crc, len(piece).to_bytes(8, "little") + piece)
    return crc
