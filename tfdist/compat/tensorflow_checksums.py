"""CRC-32C as TensorFlow stores it next to the data, in checkpoints and TFRecord files.

Relies on tensorflow/core/lib/hash/crc32c.h, for which there is no public function; without it neither kind of file
could be read in pieces, nor could checkpoints be written here.
"""

from __future__ import annotations


def masked(checksum: int) -> int:
    """The masked form of a CRC-32C, in which TensorFlow stores it."""
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF
