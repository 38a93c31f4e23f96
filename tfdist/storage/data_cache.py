"""Training data in an object store: copies of its objects in a local folder, which all workers of this machine share;
or, if no copies are wanted, byte ranges.

Each object is fetched by one process; the others wait for it. Later runs use the copies again, as long as the store
still holds the same object. copies.py describes the files, and which copies are removed when space is needed;
object_copy.py makes a copy; front_to_back.py handles objects that are read one after another.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase

from tfdist.control.exit_codes import ConfigError, DataError
from tfdist.control.own_files import lock, locked, replaced
from tfdist.control.run_address import cache_folder, check_address, folder_name
from tfdist.control.terminal import say
from tfdist.storage.copies import IN_USE, OBJECTS, STATE, digest, make_room
from tfdist.storage.folder_walk import is_plain
from tfdist.storage.in_threads import in_threads
from tfdist.storage.object_copy import ObjectCopy, remove_parts
from tfdist.storage.object_store import ObjectStore
from tfdist.storage.store_errors import as_sentence

_PROGRESS_SECONDS = 5.0
_GB = 1e9


class DataCache:
    """The objects below `url`, and the folder of their copies.

    limit: bytes that all copies of the machine may take; 0: no limit. copies: whether to copy objects that can also be
    read in pieces. Attributes: folder, with the copies; entries, the objects by name, as first listed in this process.
    """

    def __init__(self, url: str, cache_dir: str, limit: float = 0.0, copies: bool = True):
        check_address("data_dir", url)
        self.url, self._limit, self.copies = url.rstrip("/"), limit, copies
        root = cache_folder(cache_dir) / "data" / folder_name(url)
        self.folder, self._state = root / OBJECTS, root / STATE
        with as_sentence("data_dir"):
            for each in (self.folder, self._state):
                each.mkdir(0o700, parents=True, exist_ok=True)
            self._objects = ObjectStore(url)
            self.entries = {name: entry for name, entry in self._objects.entries().items() if is_plain(name)}
        self._in_use: int | None = None
        self._needed: set[str] = set()  # names of objects that are read at random
        self._one_at_a_time = threading.Lock()
        self._coming: dict[str, int] = {}  # name -> bytes of copies being fetched
        remove_parts(self._state)
        self._copies = {
            name: ObjectCopy(self._objects, name, entry, root, functools.partial(self._room, name, entry.size))
            for name, entry in self.entries.items()
        }
        for each in self._copies.values():
            each.remove_former()

    def glob(self, pattern: str) -> list[str]:
        """Sorted paths of the copies of all objects that match a file name pattern, whether the copies exist or not."""
        wanted = pattern.split("/")
        return sorted(
            self.path(name)
            for name in self.entries
            if len(parts := name.split("/")) == len(wanted) and all(map(fnmatchcase, parts, wanted))
        )

    def path(self, name: str) -> str:
        """The path of the copy of an object."""
        return str(self.folder / name)

    def size(self, path: str) -> int:
        """The size in bytes of the object whose copy is at `path`, or will be."""
        return self.entries[self._name(path)].size

    def named(self, path: str) -> str:
        """The name of an object in messages."""
        return f"--data_dir={self.url}: {self._name(path)}"

    def named_copy(self, path: str) -> str:
        """The name in messages of data that is read from the copy."""
        return f"{self.named(path)}, or its copy {path} (remove it, and it is fetched again),"

    def copy(self, path: str) -> ObjectCopy:
        """The copy that is at `path`, or will be."""
        return self._copies[self._name(path)]

    def _name(self, path: str) -> str:
        return os.path.relpath(path, self.folder)

    def must_copy(self, what: str) -> None:
        """Raises ConfigError if no copies are wanted, although `what` reads whole files."""
        if not self.copies:
            raise ConfigError(f"--nocache_data: {what} reads whole files: drop it, or read TFRecord files at random.")

    def piece(self, path: str, start: int, size: int) -> bytes:
        """Reads `size` bytes of an object, from `start` on. Raises DataError, StartupError, ConfigError."""
        with as_sentence("data_dir"):
            return self.copy(path).piece(start, size)

    def derived(self, path: str, make: Callable[[], bytes]) -> bytes:
        """Returns bytes made from an object by one process of this machine, kept as long as the object is the same."""
        copy = self.copy(path)
        file = self._state / f"{digest(self._name(path))}.derived"
        stamp = f"{json.dumps(copy.record)}\n".encode()
        with as_sentence("data_dir"), lock(copy.lock, wait=True):
            with contextlib.suppress(FileNotFoundError):
                if (kept := file.read_bytes()).startswith(stamp):
                    return kept[len(stamp) :]
            found = make()
            with replaced(file) as temporary:
                temporary.write_bytes(stamp + found)
            return found

    def bring(self, paths: Sequence[str]) -> None:
        """Fetches missing copies, and keeps them as long as this process lives. Raises ConfigError, DataError,
        StartupError.
        """
        names = [self._name(path) for path in paths]
        if missing := [name for name in names if name not in self.entries]:
            raise DataError(f"--data_dir={self.url}: {missing[0]} is missing: restore it, or prepare the data again.")
        self._needed.update(names)
        needed = sum(self.entries[name].size for name in self._needed)
        if self._limit and needed > self._limit:
            raise ConfigError(
                f"--cache_gb={self._limit / _GB:g}, but the data read from --data_dir={self.url} take"
                f" {needed / _GB:.3g} GB: raise it, or read the files from front to back (--source=tfrecord,"
                " --source_args=stream=True)."
            )
        if self._in_use is None:
            self._in_use = locked(self._state / IN_USE, fcntl.LOCK_SH)
        with as_sentence("data_dir"):
            # First the objects that nobody else is fetching; then the others, in case their fetching does not complete.
            busy = self._bring_all(names, wait=False)
            self._bring_all(busy, wait=True)

    def _bring_all(self, names: Sequence[str], wait: bool) -> list[str]:
        """Fetches objects. Returns those that others are fetching, unless it waits for them."""
        busy: list[str] = []
        progress = _Progress(self.url, {name: self.entries[name].size for name in names})

        def bring(name: str) -> None:
            found = self._copies[name].bring(wait)
            progress.done(name, fetched=found == "fetched")
            if found == "busy":
                busy.append(name)

        in_threads(bring, ((name,) for name in names))
        return busy

    @contextlib.contextmanager
    def _room(self, name: str, size: int) -> Iterator[None]:
        """Context manager that reserves space for a copy fetched meanwhile. Raises ConfigError."""
        with self._one_at_a_time:
            make_room(self.folder, size, self._limit, self.url, coming=sum(self._coming.values()))
            self._coming[name] = size
        try:
            yield
        finally:
            with self._one_at_a_time:
                del self._coming[name]


class _Progress:
    """Reports progress of long fetches. sizes: name -> bytes."""

    def __init__(self, url: str, sizes: dict[str, int]):
        self._url, self._sizes, self._left = url, sizes, dict(sizes)
        self._said, self._fetched = time.monotonic(), False

    def done(self, name: str, fetched: bool) -> None:
        self._left.pop(name, None)
        self._fetched |= fetched
        if self._fetched and time.monotonic() - self._said > _PROGRESS_SECONDS:
            self._said, self._fetched = time.monotonic(), False
            total = sum(self._sizes.values())
            say(
                f"fetching {self._url}: {len(self._sizes) - len(self._left)} of {len(self._sizes)} objects,"
                f" {(total - sum(self._left.values())) / _GB:.3g} of {total / _GB:.3g} GB"
            )


@functools.cache
def data_cache(url: str, cache_dir: str, limit: float, copies: bool) -> DataCache:
    """Returns the cache of a URL, one per process; its content is listed once. Raises ConfigError, StartupError."""
    found = DataCache(url, cache_dir, limit, copies)
    _OPEN[str(found.folder)] = found
    return found


_OPEN: dict[str, DataCache] = {}


def cache_of(folder: str) -> DataCache | None:
    """The cache whose copies are in a folder; None if this is a folder of normal files."""
    return _OPEN.get(folder)
