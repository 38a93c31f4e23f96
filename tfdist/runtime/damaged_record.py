"""Finds the TFRecord file of a damaged record: TensorFlow's error tells the byte, but not the file."""

from __future__ import annotations

import mmap
import os
import re
import time
from collections.abc import Iterable

from tfdist.compat.tensorflow_checksums import FRAME_BYTES, HEADER_BYTES, data_in, length_in

_MOST_SECONDS = 20.0
_OFTEN = 2**16  # records between two looks at the clock
# Messages of tensorflow/core/lib/io/record_reader.cc. The byte is that of the record's header or of its data.
_AT = re.compile(r"(?:corrupted|truncated) record at (\d+)")

_read: dict[str, None] = {}  # the files, in order


def note_files(paths: Iterable[str]) -> None:
    """Notes that this process lets TensorFlow read these files, which are not compressed."""
    _read.update(dict.fromkeys(paths))


def damaged_file(message: str) -> str:
    """Returns a sentence about the file that TensorFlow's error `message` is about; "" if it is not found in time."""
    found, end = _AT.search(message), time.monotonic() + _MOST_SECONDS
    if not found:
        return ""
    for path in _read:
        if time.monotonic() > end:
            break
        try:
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                begin = _damaged_at(data, int(found[1]), end)
        except (OSError, ValueError):  # gone, of an object store, or empty
            continue
        if begin is not None:
            return f"{os.path.abspath(path)} is damaged: the record at byte {begin} is incomplete; restore the file."
    return ""


def _damaged_at(data: mmap.mmap, place: int, end: float) -> int | None:
    """Returns where the damaged record begins if one begins at `place` or has its data there, else None."""
    begin, number = 0, 0
    while begin < place - HEADER_BYTES and (length := length_in(data[begin : begin + HEADER_BYTES])) is not None:
        begin += FRAME_BYTES + length
        number += 1
        if number % _OFTEN == 0 and time.monotonic() > end:
            return None
    return begin if begin in (place, place - HEADER_BYTES) and not _is_whole(data, begin) else None


def _is_whole(data: mmap.mmap, begin: int) -> bool:
    length = length_in(data[begin : begin + HEADER_BYTES])
    stored = slice(begin + HEADER_BYTES, begin + FRAME_BYTES + (length or 0))
    return length is not None and data_in(data[stored], length) is not None
