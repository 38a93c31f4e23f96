"""Training data of an object store: copies of its objects in a folder of this machine, which all workers there share;
or, where no copies are wanted, byte ranges.

Each object is fetched by one process; the others wait for it. What is there is used again by later runs, as long as the
store still holds the same object. How the copies lie there, and which are removed when room is needed: copies.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tfdist.control.exit_codes import ConfigError, DataError
from tfdist.control.own_files import replaced, written_whole
from tfdist.control.run_address import cache_folder, check_address, folder_name
from tfdist.storage.copies import IN_USE, OBJECTS, STATE, Copy, digest, lock, locked, make_room
from tfdist.storage.in_threads import in_threads
from tfdist.storage.object_store import ObjectStore
from tfdist.storage.store_errors import as_sentence

_PROGRESS_SECONDS = 5.0
_GB = 1e9


class DataCache:
    """The objects below `url`, and the folder of their copies.

    limit: bytes that all copies of the machine may take; 0: no limit. copies: whether any are wanted of what can be
    read in pieces. Attributes: folder, the copies; entries, the objects by name, as they were when this process first
    looked.
    """

    def __init__(self, url: str, cache_dir: str = "", limit: float = 0.0, copies: bool = True):
        check_address("data_dir", url)
        self.url, self._limit, self.copies = url.rstrip("/"), limit, copies
        root = cache_folder(cache_dir) / "data" / folder_name(url)
        self.folder, self._state = root / OBJECTS, root / STATE
        with as_sentence("data_dir"):
            for each in (self.folder, self._state):
                each.mkdir(0o700, parents=True, exist_ok=True)
            self._objects = ObjectStore(url)
            self.entries = {name: entry for name, entry in self._objects.entries().items() if _is_plain(name)}
        self._in_use: int | None = None
        self._needed: set[str] = set()  # names of those that are read at random
        self._pins: dict[str, int] = {}  # of those that are read from front to back: name -> descriptor of its lock
        self._one_at_a_time = threading.Lock()
        self._ahead: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._fetcher: threading.Thread | None = None
        for name in self.entries:
            self._remove_former(name)

    def glob(self, pattern: str) -> list[str]:
        """Paths of the copies of those objects that match a file name pattern, sorted; there or not."""
        wanted = pattern.split("/")
        return sorted(
            self.path(name)
            for name in self.entries
            if len(parts := name.split("/")) == len(wanted) and all(map(fnmatchcase, parts, wanted))
        )

    def path(self, name: str) -> str:
        """Of the copy of an object."""
        return str(self.folder / name)

    def size(self, path: str) -> int:
        """Bytes of the object of which `path` is the copy, or will be."""
        return self.entries[self._name(path)].size

    def named(self, path: str) -> str:
        """How messages name it."""
        return f"--data_dir={self.url}: {self._name(path)}"

    def _name(self, path: str) -> str:
        return os.path.relpath(path, self.folder)

    def must_copy(self, what: str) -> None:
        """Raises ConfigError if no copies are wanted, though `what` reads whole files."""
        if not self.copies:
            raise ConfigError(f"--nocache_data: {what} reads whole files: drop it, or read TFRecord files at random.")

    def piece(self, path: str, start: int, size: int) -> bytes:
        """So many bytes of an object, from one on. Raises DataError, StartupError, ConfigError."""
        name = self._name(path)
        with as_sentence("data_dir"):
            try:
                found = self._objects.piece(name, start, size)
            except FileNotFoundError:
                self._same(name)
                raise
            self._same(name)  # else they may be another's
            return found

    def derived(self, path: str, make: Callable[[], bytes]) -> bytes:
        """What is made of an object, by one process of this machine, and kept as long as the object is the same."""
        name = self._name(path)
        file, stamp = self._state / f"{digest(name)}.derived", f"{json.dumps(self._record(name))}\n".encode()
        with as_sentence("data_dir"), lock(self._lock_of(name), wait=True):
            with contextlib.suppress(FileNotFoundError):
                if (kept := file.read_bytes()).startswith(stamp):
                    return kept[len(stamp) :]
            found = make()
            with replaced(file) as temporary:
                temporary.write_bytes(stamp + found)
            return found

    # -- all of them -----------------------------------------------------------------------------------------------

    def bring(self, paths: Sequence[str]) -> None:
        """Fetches what is not there yet; it stays there as long as this process lives. Raises ConfigError, DataError,
        StartupError.
        """
        names = [self._name(path) for path in paths]
        if missing := [name for name in names if name not in self.entries]:
            raise DataError(f"--data_dir={self.url}: {missing[0]} is not there: restore it, or prepare the data again.")
        self._needed.update(names)
        needed = sum(self.entries[name].size for name in self._needed)
        if self._limit and needed > self._limit:
            raise ConfigError(
                f"--cache_gb={self._limit / _GB:g}, but what is read of --data_dir={self.url} takes {needed / _GB:.3g}"
                " GB: raise it, or read the files from front to back (--source=tfrecord, --source_args=stream=True)."
            )
        if self._in_use is None:
            self._in_use = locked(self._state / IN_USE, fcntl.LOCK_SH)
        with as_sentence("data_dir"):
            # First what nobody else is fetching; then what others are, should they not come to an end with it.
            busy = self._bring_all(names, wait=False)
            self._bring_all(busy, wait=True)

    def _bring_all(self, names: Sequence[str], wait: bool) -> list[str]:
        """Returns those that others are fetching, unless they are to be waited for."""
        busy: list[str] = []
        progress = _Progress(self.url, {name: self.entries[name].size for name in names})

        def bring(name: str) -> None:
            found = self._bring_one(name, wait)
            progress.done(name, fetched=found == "fetched")
            if found == "busy":
                busy.append(name)

        in_threads(bring, ((name,) for name in names))
        return busy

    # -- one after the other ---------------------------------------------------------------------------------------

    def bring_next(self, path: str, ahead: Sequence[str], over: Sequence[str] = ()) -> str:
        """Fetches one if need be, and then, in a thread, those `ahead`. Returns `path`. Those `over` are not read any
        more, and may be removed when room is needed. Raises DataError, StartupError, ConfigError.
        """
        with as_sentence("data_dir"):
            self._pin(name := self._name(path))
            self._bring_one(name, wait=True)
        with self._one_at_a_time:
            for each in over:
                if (descriptor := self._pins.pop(self._name(each), None)) is not None:
                    os.close(descriptor)
        for each in ahead:
            self._ahead.put(self._name(each))
        if self._fetcher is None:
            self._fetcher = threading.Thread(target=self._fetch_ahead, name="tfdist-data-ahead", daemon=True)
            self._fetcher.start()
        return path

    def _fetch_ahead(self) -> None:
        while True:
            with contextlib.suppress(OSError, DataError, ConfigError):  # whoever reads it will say
                name = self._ahead.get()
                self._pin(name)
                self._bring_one(name, wait=False)

    def _pin(self, name: str) -> None:
        """Until it is over nobody removes it."""
        with self._one_at_a_time:
            if name not in self._pins:
                self._pins[name] = locked(self._pin_of(name), fcntl.LOCK_SH)

    # -- one -------------------------------------------------------------------------------------------------------

    def _bring_one(self, name: str, wait: bool) -> str:
        """ "there", "fetched", or "busy": another process is fetching it. Raises DataError, StoreError, OSError."""
        entry, record = self.entries[name], self._record_of(name)
        with lock(self._lock_of(name), wait) as held:
            if not held:
                return "busy"
            if (told := self._told(name)) == self._record(name) and self._is_whole(name):
                with contextlib.suppress(OSError):
                    os.utime(record)  # when it was last used
                return "there"
            if told and told != self._record(name):
                raise DataError(
                    f"--data_dir={self.url}: {name} has been changed, and another job on this machine still reads what"
                    " it was: end that job, or choose another --cache_dir."
                )
            self._same(name)
            record.unlink(missing_ok=True)
            make_room(self.folder, entry.size, self._limit, self.url)
            try:
                self._objects.fetch(name, self.folder / name, entry.size)
            except FileNotFoundError:
                self._same(name)
                raise
            self._same(name)  # else the copy may be of both
            with written_whole(record) as file:
                json.dump(self._record(name), file)
            return "fetched"

    def _record(self, name: str) -> dict[str, Any]:
        """What is said of a whole copy of the object."""
        return {"name": name, "bytes": self.entries[name].size, "version": self.entries[name].version}

    def _told(self, name: str) -> dict[str, Any] | None:
        """What is said of the copy that is there."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads(self._record_of(name).read_text())
        return None

    def _is_whole(self, name: str) -> bool:
        with contextlib.suppress(OSError):
            return (self.folder / name).stat().st_size == self.entries[name].size
        return False

    def _remove_former(self, name: str) -> None:
        """A copy of what the object was before, unless a job reads it."""
        told = self._told(name)
        if told and told != self._record(name):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                Copy(self._record_of(name)).remove()

    def _same(self, name: str) -> None:
        """Raises DataError if the object is no longer the one that was listed."""
        entry, now = self.entries[name], self._objects.entry(name)
        if now != entry:
            what = "is not there any more" if now is None else "has been changed"
            raise DataError(
                f"--data_dir={self.url}: {name} {what} since this run began to read: restore it, or start again with"
                " the data as they are now."
            )

    def _record_of(self, name: str) -> Path:
        return self._state / digest(name)

    def _lock_of(self, name: str) -> Path:
        return self._state / f"{digest(name)}.lock"

    def _pin_of(self, name: str) -> Path:
        return self._state / f"{digest(name)}.pin"


class _Progress:
    """What is said while much is fetched. sizes: name -> bytes."""

    def __init__(self, url: str, sizes: dict[str, int]):
        self._url, self._sizes, self._left = url, sizes, dict(sizes)
        self._said, self._fetched = time.monotonic(), False

    def done(self, name: str, fetched: bool) -> None:
        self._left.pop(name, None)
        self._fetched |= fetched
        if self._fetched and time.monotonic() - self._said > _PROGRESS_SECONDS:
            self._said, self._fetched = time.monotonic(), False
            total = sum(self._sizes.values())
            print(
                f"tfdist: bringing {self._url}: {len(self._sizes) - len(self._left)} of {len(self._sizes)} objects,"
                f" {(total - sum(self._left.values())) / _GB:.3g} of {total / _GB:.3g} GB",
                file=sys.stderr,
                flush=True,
            )


@functools.cache
def data_cache(url: str, cache_dir: str, limit: float, copies: bool = True) -> DataCache:
    """That of a URL, one a process: what it holds is looked at once. Raises ConfigError, StartupError."""
    found = DataCache(url, cache_dir, limit, copies)
    _OPEN[str(found.folder)] = found
    return found


_OPEN: dict[str, DataCache] = {}


def cache_of(folder: str) -> DataCache | None:
    """The one whose copies are in a folder; None if this is a folder of files that are there."""
    return _OPEN.get(folder)


def _is_plain(name: str) -> bool:
    """Whether it is a file's, and no hidden one's."""
    return bool(name) and not any(part in ("", "..") or part.startswith(".") for part in name.split("/"))
