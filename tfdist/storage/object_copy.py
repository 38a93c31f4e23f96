"""The copy of one object of a store. One process of the machine makes it and all use it: when it is complete, or, when
reading from front to back, while it still grows.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tfdist.control.exit_codes import DataError
from tfdist.control.own_files import lock, written_whole
from tfdist.storage.copies import OBJECTS, STATE, Copy, digest
from tfdist.storage.object_store import ObjectStore
from tfdist.storage.store_entry import Entry

_FIRST_PIECE_BYTES = 1 << 20  # first piece of an object that is read while it grows
_LARGEST_PIECE_BYTES = 1 << 23
_READABLE = 0o666  # less the umask


class ObjectCopy:
    """entry: the object's entry in the store. root: folder of the copies and their state. room: context manager that
    reserves space for the copy. Attributes: file, the copy; lock and pin, files that are locked (copies.py).
    """

    def __init__(
        self, objects: ObjectStore, name: str, entry: Entry, root: Path, room: Callable[[], AbstractContextManager]
    ):
        self._objects, self._name, self._entry, self._room = objects, name, entry, room
        self.record: dict[str, Any] = {"name": name, "bytes": entry.size, "version": entry.version}
        state, begins = root / STATE, digest(name)
        self.file, self._record_file = root / OBJECTS / name, state / begins
        self.lock, self.pin = state / f"{begins}.lock", state / f"{begins}.pin"
        # For this version only: another job may have seen another version, and fetch that.
        self._part = state / f"{begins}.{digest(json.dumps(self.record))}.part"

    def bring(self, wait: bool, growing: bool = False) -> str:
        """Fetches the copy. Returns "there", "fetched", or "busy" (another is fetching it). growing: it can be read
        meanwhile. Raises DataError, ConfigError, StoreError, OSError.
        """
        with lock(self.lock, wait) as held:
            if not held:
                return "busy"
            if self.is_there():
                self.mark_used()
                return "there"
            if (stored := self._record_there()) and stored != self.record:
                raise DataError(
                    f"--data_dir={self._objects.url}: {self._name} has been changed, but another job on this machine"
                    " still reads the old version: end that job, or choose another --cache_dir."
                )
            self.check_same()
            self._record_file.unlink(missing_ok=True)
            with self._room():
                self._fetch(growing)
                with written_whole(self._record_file) as file:  # only from now on it counts as a copy
                    json.dump(self.record, file)
            return "fetched"

    def is_there(self) -> bool:
        """Whether the copy is complete, and of this version."""
        with contextlib.suppress(OSError):
            return self._record_there() == self.record and self.file.stat().st_size == self._entry.size
        return False

    def mark_used(self) -> None:
        """Marks the copy as used now; those unused for longest are removed first."""
        with contextlib.suppress(OSError):
            os.utime(self._record_file)

    def read(self, start: int, size: int) -> bytes:
        """Reads `size` bytes from `start` on, or as many of them as have arrived."""
        found = _read(self._part, start, size)
        if len(found) < size and self.is_there():
            found = _read(self.file, start, size)
        return found

    def remove_former(self) -> None:
        """Removes a copy of an earlier version of the object, unless a job reads it."""
        stored = self._record_there()
        if stored and stored != self.record:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                Copy(self._record_file).remove()

    def check_same(self) -> None:
        """Raises DataError if the object is no longer the listed one."""
        now = self._objects.entry(self._name)
        if now != self._entry:
            what = "no longer exists" if now is None else "has been changed"
            raise DataError(
                f"--data_dir={self._objects.url}: {self._name} {what} since this run began to read: restore it, or"
                " start again with the data as they are now."
            )

    def piece(self, start: int, size: int) -> bytes:
        """Reads `size` bytes of the object, from `start` on. Raises DataError, StoreError."""
        try:
            found = self._objects.piece(self._name, start, size)
        except FileNotFoundError:
            self.check_same()
            raise
        self.check_same()  # else they may be another's
        return found

    def _fetch(self, growing: bool) -> None:
        if growing:
            self._grow()
            return
        try:
            self._objects.fetch(self._name, self.file, self._entry.size)
        except FileNotFoundError:
            self.check_same()
            raise
        self.check_same()  # else the copy may be of both

    def _grow(self) -> None:
        """Fetches the object into a growing file, whose content is at any time the beginning of the listed object."""
        self._part.unlink(missing_ok=True)  # left by a killed process; readers of it open the new one
        try:
            with open(os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _READABLE), "wb", buffering=0) as file:
                start, size = 0, _FIRST_PIECE_BYTES
                while start < self._entry.size:
                    piece = memoryview(self.piece(start, min(size, self._entry.size - start)))
                    start, size = start + len(piece), min(2 * size, _LARGEST_PIECE_BYTES)
                    while piece:
                        piece = piece[file.write(piece) :]
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._part.replace(self.file)
        except BaseException:
            self._part.unlink(missing_ok=True)
            raise

    def _record_there(self) -> dict[str, Any] | None:
        """The record of the existing copy."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads(self._record_file.read_text())
        return None


def remove_parts(state: Path) -> None:
    """Removes the leftovers of killed processes."""
    for part in state.glob("*.part"):
        with contextlib.suppress(OSError), lock(state / f"{part.name.partition('.')[0]}.lock", wait=False) as held:
            if held:
                part.unlink(missing_ok=True)


def _read(file: Path, start: int, size: int) -> bytes:
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except FileNotFoundError:
        return b""
    try:
        return os.pread(descriptor, size, start)
    finally:
        os.close(descriptor)
