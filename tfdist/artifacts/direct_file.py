"""Large files that are written once and not read again soon: past the page cache, where the file system can.

Through the page cache a file costs a copy by the kernel, and pages for it; in a virtual machine, to which such pages
may be new, ten times as much as the copy (docs/speed_log.md). It also drives out what is read often, the training data.
Directly (O_DIRECT) the device reads this process's own memory.
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
_PIECE_BYTES = 1 << 18  # stays in a core's own cache between the copy and its checksums


class DirectFile:
    """A file of bytes, from its first to its last. As a context manager it is closed; what `flush` has returned for is
    on the disk.

    direct: whether past the page cache. Where the file system refuses that, the file is written as any other.
    Attributes: size, in bytes; checksum, CRC-32C. Every method raises OSError.
    """

    def __init__(self, path: str, direct: bool):
        self.size = self.checksum = 0
        self._descriptor, self._direct = _opened(path, direct)
        try:
            self._memory = mmap.mmap(-1, _BUFFER_BYTES)  # begins with a page, as the device asks
        except BaseException:
            os.close(self._descriptor)
            raise
        self._buffer, self._filled = np.frombuffer(self._memory, np.uint8), 0

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *_: Any) -> None:
        os.close(self._descriptor)

    def append(self, content: np.ndarray) -> int:
        """content: bytes (uint8, one dim). Returns their CRC-32C."""
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
        """Waits until all is on the disk, which must not lose it when the power fails."""
        if self._filled:
            self._through_the_cache()  # the last bytes are no whole blocks
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
                self._through_the_cache()  # the device has other blocks
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
    """(descriptor, whether it is written directly)."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    if direct and _DIRECT:
        try:
            return os.open(path, flags | _DIRECT, 0o666), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, flags, 0o666), False
