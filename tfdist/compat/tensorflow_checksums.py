"""CRC-32C as TensorFlow stores it next to the data, in checkpoints and TFRecord files.

Relies on tensorflow/core/lib/hash/crc32c.h and tensorflow/core/lib/io/record_writer.h, for which there are no public
functions; without them neither kind of file could be read in pieces, nor could checkpoints be written here.

A record of a TFRecord file is: length (uint64), checksum of the length, the data, checksum of the data.
"""

from __future__ import annotations

import struct

import google_crc32c

_HEADER = struct.Struct("<QI")
_CHECKSUM_BYTES = 4
HEADER_BYTES = _HEADER.size  # before the data of a record
FRAME_BYTES = HEADER_BYTES + _CHECKSUM_BYTES  # bytes of a record that are not data


def masked(checksum: int) -> int:
    """The masked form of a CRC-32C, in which TensorFlow stores it."""
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def length_in(header: bytes) -> int | None:
    """The number of data bytes of a record, by its header; None if the header is cut short or its checksum is wrong."""
    if len(header) < HEADER_BYTES:
        return None
    length, checksum = _HEADER.unpack(header)
    return length if _masked_of(header[:8]) == checksum else None


def data_in(stored: bytes, length: int) -> bytes | None:
    """The data of a record, without the checksum after it; None if it is cut short or the checksum is wrong."""
    data, checksum = stored[:length], stored[length:]
    is_whole = len(checksum) == _CHECKSUM_BYTES and _masked_of(data) == int.from_bytes(checksum, "little")
    return data if is_whole else None


def _masked_of(data: bytes) -> int:
    return masked(google_crc32c.value(data))
