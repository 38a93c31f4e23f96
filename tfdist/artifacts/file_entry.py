"""The entry of a file in a manifest: its size and its checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import google_crc32c
import numpy as np

from tfdist.artifacts.manifest import CRC, SHA
from tfdist.control.own_files import flush_to_disk

_BLOCK = 1 << 20


def checksum_of(entry: Mapping[str, Any]) -> str:
    """The kind of checksum in an entry of a manifest."""
    return SHA if SHA in entry else CRC


def has_content(path: str, entry: Mapping[str, Any]) -> bool:
    """Whether there is such a file, with the size and checksum in an entry of a manifest. Raises OSError."""
    try:
        return measure(path, checksum_of(entry), flush=False).items() <= entry.items()
    except FileNotFoundError:
        return False


def measure(path: str, checksum: str, flush: bool) -> dict[str, Any]:
    """Returns the entry of a file in a manifest: its size and `checksum`. Flushes the file to the disk first if asked.

    Raises OSError.
    """
    if flush:
        flush_to_disk(path)
    sha, crc, size = hashlib.sha256(), 0, 0
    block = np.empty(_BLOCK, np.uint8)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block.data):
            size += count
            if checksum == SHA:
                sha.update(block[:count].data)
            else:
                crc = google_crc32c.extend(crc, block[:count])
    return {"bytes": size, checksum: sha.hexdigest() if checksum == SHA else f"{crc:08x}"}
