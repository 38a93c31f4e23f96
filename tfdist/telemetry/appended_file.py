"""A file to which a run appends its events, each as one piece: a line or a record.

What cannot be written, as on a full disk, is kept in memory and written later. If the file is removed or renamed while
the run goes on, as by logrotate, it is opened again: else what follows would go to a file without a name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import deque
from io import FileIO
from pathlib import Path

from tfdist.control.own_files import appended_to
from tfdist.control.terminal import say

_LIMIT = 16 * 2**20  # bytes that are kept in memory
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


class AppendedFile:
    """Appends pieces without a buffer, so that no event is lost when the process is killed.

    Raises OSError if the file cannot be opened at first.
    """

    def __init__(self, path: Path):
        self.path, self._limit = path, _LIMIT
        self._waiting: deque[bytes] = deque()  # not yet written, or not to their end
        self._written = 0  # bytes of the first of them that the file has
        self._size = 0  # bytes of all of them
        self._dropped, self._fails = 0, False
        self._beginning = b""
        self._file, self._is_followed = self._opened(), True
        self._is_followed = not self._is_gone()  # on some network file systems a file's number changes

    def beginning(self) -> bytes:
        """Returns what is written first whenever the file has been opened."""
        return b""

    def path_now(self) -> Path:
        """Returns the path under which the file is opened now."""
        return self.path

    def check(self) -> None:
        """Raises an error if the file that now has the name must not be appended to."""

    def write(self, piece: bytes) -> None:
        """Writes a piece, after those that wait. Raises no OSError: what cannot be written waits."""
        self._add(piece, len(self._waiting))
        while self._size > self._limit and len(self._waiting) > 1:
            self._size -= len(self._waiting[1])  # not the first: a part of it may be in the file
            del self._waiting[1]
            self._dropped += 1
        error = self._try()
        if error and not self._fails:
            why = f"cannot be written ({error.strerror}): its events are kept in memory until it can."
            _tell(f"WARNING: {self.path} {why}")
        elif self._fails and not error:
            lost = f" {self._dropped:,} events are lost: there were too many for the memory." if self._dropped else ""
            _tell(f"{self.path} can be written again.{lost}")
            self._dropped = 0
        self._fails = bool(error)

    def close(self) -> None:
        """Raises OSError if something cannot be written."""
        try:
            error = self._try()
        finally:
            self._file.close()
        if error:
            raise error

    def _opened(self) -> FileIO:
        path = self.path_now()
        path.parent.mkdir(parents=True, exist_ok=True)
        beginning = self.beginning()
        file = FileIO(appended_to(path), "ab")
        self.path, self._written = path, 0
        if self._beginning and self._waiting and self._waiting[0] is self._beginning:
            self._size -= len(self._waiting.popleft())
        self._beginning = beginning
        if beginning:
            self._add(beginning, 0)
        return file

    def _open_again(self) -> None:
        self.check()
        gone, before = self.path, self._file
        self._file = self._opened()
        with contextlib.suppress(OSError):
            before.close()
        _tell(f"WARNING: {gone} was removed or renamed: it is reopened.")

    def _is_gone(self) -> bool:
        """Whether the name belongs to another file by now, or to none."""
        try:
            held = os.fstat(self._file.fileno())
            named = os.stat(self.path)
        except OSError as error:
            return error.errno in _GONE
        return stat.S_ISREG(held.st_mode) and not os.path.samestat(held, named)

    def _add(self, piece: bytes, place: int) -> None:
        self._waiting.insert(place, piece)
        self._size += len(piece)

    def _try(self) -> OSError | None:
        """Writes what waits. Returns the error that has prevented it."""
        try:
            if self._waiting and self._is_followed and self._is_gone():
                self._open_again()
            while self._waiting:
                first = self._waiting[0]
                self._written += os.write(self._file.fileno(), memoryview(first)[self._written :])
                if self._written == len(first):
                    self._size -= len(self._waiting.popleft())
                    self._written = 0
        except OSError as error:
            return error
        return None


def _tell(sentence: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # standard error may be closed, or on the same full disk
        say(sentence)
