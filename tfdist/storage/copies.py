"""Copies of objects on this machine's disk, shared by all its jobs: which exist, who uses them, and which are removed
when space is needed.

    CACHE_DIR/data/FOLDER/objects/...        the copies, under the names that the objects have below their URL
    CACHE_DIR/data/FOLDER/state/HASH         for one copy: the version of its object; mtime: when it was last used
    CACHE_DIR/data/FOLDER/state/HASH.lock    locked while it is fetched
    CACHE_DIR/data/FOLDER/state/HASH.*.part  the part that has arrived so far, if it is read meanwhile
    CACHE_DIR/data/FOLDER/state/HASH.pin     locked by jobs that are reading it, from front to back
    CACHE_DIR/data/FOLDER/state/HASH.derived data made from the object where no copies are wanted, such as an index
    CACHE_DIR/data/FOLDER/state/in-use       locked by jobs that read all copies there, at random

A lock ends with the process that holds it, however that ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from tfdist.control.exit_codes import ConfigError
from tfdist.control.own_files import lock

OBJECTS, STATE, IN_USE = "objects", "state", "in-use"


class Copy:
    """A copy that some job has fetched. record: the file that describes it."""

    def __init__(self, record: Path):
        fields = json.loads(record.read_text())
        self._record, self.used = record, record.stat().st_mtime
        self._file = record.parent.parent / OBJECTS / fields["name"]
        self.size = self._file.stat().st_size

    def remove(self) -> bool:
        """Removes the copy. Returns False if a job reads it."""
        state = self._record.parent
        with (
            lock(state / IN_USE, wait=False) as unused,
            lock(self._record.with_suffix(".pin"), wait=False) as unread,
            lock(self._record.with_suffix(".lock"), wait=False) as unfetched,
        ):
            if unused and unread and unfetched:
                self._record.unlink(missing_ok=True)
                self._file.unlink(missing_ok=True)
                return True
        return False


def copies(folder: Path) -> Iterator[Copy]:
    """Yields all copies below a cache's folder."""
    for record in folder.glob(f"*/{STATE}/*"):
        if not record.suffix and record.name != IN_USE:
            with contextlib.suppress(OSError, ValueError, KeyError):
                yield Copy(record)


def make_room(folder: Path, size: int, limit: float, url: str, coming: int) -> None:
    """Makes space for a copy of `size` bytes in the objects' folder of `url`: removes the copies unused for longest.

    limit: bytes that all copies of the cache may take; 0: no limit. Copies that jobs are reading stay, even beyond it.
    coming: bytes of copies for which space was made before, and which are not there yet. Raises ConfigError if the disk
    is full.
    """
    there = list(copies(folder.parent.parent)) if limit else []
    taken = coming + sum(each.size for each in there)
    for each in sorted(there, key=lambda each: each.used):
        if taken + size <= limit:
            break
        if each.remove():
            taken -= each.size
    if size > (free := shutil.disk_usage(folder).free):
        raise ConfigError(
            f"{folder} has {free / 1e9:.3g} GB left, not enough for a copy of {size / 1e9:.3g} GB of --data_dir={url}:"
            " make room, or choose another --cache_dir."
        )


def digest(name: str) -> str:
    """The prefix of the names of an object's state files."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]
