"""Large files that are written once and not read again soon: written past the page cache, if the file system allows it.

Through the page cache a file costs a copy by the kernel, and memory pages for it; in a virtual machine, where such
pages may be new, these cost ten times as much as the copy (docs/speed_log.md). It also evicts data that is read often:
the training data. With O_DIRECT the device reads this process's own memory.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import Any

import google_crc32c
import numpy as np

_DIRECT = getattr(os, "O_DIRECT", 0)  # 0: not on this system
_BUFFER_BYTES = 4 << 20
_PIECE_BYTES = 1 << 18  # fits into a core's cache between the copy and its checksums


class DirectFile:
    """A file of bytes, written from beginning to end. A context manager that closes it; after `flush` returns, all
    earlier bytes are on the disk.

    direct: whether to bypass the page cache. If the file system refuses this, the file is written normally.
    Attributes: size, in bytes; checksum, CRC-32C. Every method raises OSError.
    """

    def __init__(self, path: str, direct: bool):
        self.size = self.checksum = 0
        self._descriptor, self._direct = _opened(path, direct)
        try:
            self._memory = mmap.mmap(-1, _BUFFER_BYTES)  # page-aligned, as the device requires
        except BaseException:
            os.close(self._descriptor)
            raise
        self._buffer, self._filled = np.frombuffer(self._memory, np.uint8), 0

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *_: Any) -> None:
        os.close(self._descriptor)

    def append(self, content: np.ndarray) -> int:
        """Appends bytes (uint8, one dim). Returns their CRC-32C."""
        checksum = place = 0
        while place < len(content):
            length = min(_PIECE_BYTES, len(content) - place, _BUFFER_BYTES - self._filled)
            piece = self._buffer[self._filled : self._filled + length]
            piece[:] = content[place : place + length]
            checksum = google_crc32c.extend(checksum, piece)
            self.checksum = google_crc32c.extend(self.checksum, piece)
            place, self._filled, self.size = place + length, self._filled + length, self.size + length
            if self._filled == _BUFFER_BYTES:
                self._write()
        return checksum

    def flush(self) -> None:
        """Waits until everything is on the disk, safe from a power failure."""
        if self._filled:
            self._through_the_cache()  # the last bytes are not whole blocks
            self._write()
        os.fsync(self._descriptor)

    def _write(self) -> None:
        left = memoryview(self._memory)[: self._filled]
        while left:
            try:
                written = os.write(self._descriptor, left)
            except OSError as error:
                if not self._direct or error.errno != errno.EINVAL:
                    raise
                self._through_the_cache()  # the device has another block size
                continue
            left = left[written:]
            if left and written % mmap.PAGESIZE:
                self._through_the_cache()
        self._filled = 0

    def _through_the_cache(self) -> None:
        if self._direct:
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
            self._direct = False


def _opened(path: str, direct: bool) -> tuple[int, bool]:
    """(descriptor, whether writes are direct)."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    if direct and _DIRECT:
        try:
            return os.open(path, flags | _DIRECT, 0o666), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, flags, 0o666), False
