"""The objects below one URL, and the few operations that tfdist needs of a store, built on fsspec's file systems.

Transient faults (a lost connection, an answer 500, a truncated body) are retried with growing pauses, for `patience`
seconds; permanent ones (no credentials, no permission, no bucket) for 2 seconds at most. Then StoreError gives the
reason in a sentence. Credentials come from each store's own environment variables and files, and are never shown.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import importlib
import os
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tfdist.control.optional_packages import optional_module
from tfdist.control.own_files import replaced
from tfdist.control.run_address import STORES
from tfdist.storage.folder_walk import found_below
from tfdist.storage.in_threads import in_threads
from tfdist.storage.store_entry import Entry
from tfdist.storage.store_errors import StoreError, explained, is_of_this_machine, says_it_is_there

PATIENCE_SECONDS = 60.0
_REFUSED_SECONDS = 2.0  # a refusal may be transient, too, but rarely is
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 10.0
_SLOW_BYTES_PER_SECOND = 2e6
_WHOLE_BYTES = 1 << 25  # a file that may grow meanwhile is read in one go up to this size
_WEBHDFS_SECONDS = (5.0, 60.0)  # to connect, for an answer
_BUCKETS = ("s3", "gs", "abfs")  # stores in which the first part of a path must exist; folders need not
_EXCLUSIVE_WRITES = ("s3", "gs", "abfs")  # with pipe_file(mode="create")
T = TypeVar("T")


@dataclass(frozen=True)
class _UnderWay:
    """An operation under way. begun: time.monotonic(); size: bytes to transfer."""

    what: str
    begun: float
    size: int


class ObjectStore:
    """The objects below `url`, by their names relative to it, such as "logs/rank-0.jsonl".

    patience: seconds for which failed operations are retried. allowed: called before a write or removal is retried,
    which may be long after the first attempt; may raise StoreError. Both may be changed at any time.
    """

    def __init__(self, url: str, patience: float = PATIENCE_SECONDS):
        self.url, self.patience = url.rstrip("/"), patience
        self.allowed: Callable[[], None] = lambda: None
        self._waiting: dict[object, _UnderWay] = {}  # by a unique key
        self._scheme = self.url.partition("://")[0]
        self._system, self._root = _file_system(self.url)

    def names(self, below: str = "") -> dict[str, int]:
        """name -> bytes of all objects below a folder. Raises StoreError."""
        return {name: entry.size for name, entry in self.entries(below).items()}

    def entries(self, below: str = "") -> dict[str, Entry]:
        """name -> Entry of all objects below a folder. Raises StoreError."""
        place = f"{self._root}/{below}".rstrip("/")

        def look() -> dict[str, Entry]:
            try:
                has_folders = self._scheme not in _BUCKETS
                found = found_below(self._system, place) if has_folders else self._system.find(place, detail=True)
            except FileNotFoundError:
                if self._has_bucket():
                    return {}
                raise
            entries = found.values() if isinstance(found, dict) else ()
            if self._scheme == "abfs" and not entries and not self._has_bucket():
                raise FileNotFoundError(self._root)
            found = {entry["name"][len(self._root) + 1 :]: Entry.of(entry) for entry in entries}
            return {name: each for name, each in found.items() if name and name[-1] != "/"}  # marks of folders

        return self._patiently(f"listing {below or 'the folder'}", look)

    def _has_bucket(self) -> bool:
        """Whether the bucket exists: then a listing that failed only lacks a folder, which a store need not have."""
        with contextlib.suppress(FileNotFoundError):
            self._system.ls(self._root.strip("/").partition("/")[0], detail=False)
            return True
        return False

    def text(self, name: str) -> str | None:
        """An object's content; None if there is none. Raises StoreError."""

        def read() -> str | None:
            try:
                return self._system.cat_file(self._path(name)).decode("utf-8", "replace")
            except FileNotFoundError:
                return None

        return self._patiently(f"reading {name}", read)

    def size(self, name: str) -> int | None:
        """The size of an object in bytes; None if there is none. Raises StoreError."""
        entry = self.entry(name)
        return entry.size if entry else None

    def entry(self, name: str) -> Entry | None:
        """The entry of an object in the store; None if there is none. Raises StoreError."""

        def look() -> Entry | None:
            try:
                return Entry.of(self._system.info(self._path(name)))
            except FileNotFoundError:
                return None

        return self._patiently(f"looking at {name}", look)

    def put_text(self, name: str, text: str) -> None:
        """Writes an object. Raises StoreError."""
        self._patiently(f"writing {name}", lambda: self._system.pipe_file(self._path(name), text.encode()), writes=True)

    def create_text(self, name: str, text: str) -> bool:
        """Writes an object if none has this name; returns False if one has. Raises StoreError."""

        def create() -> bool:
            path = self._path(name)
            if self._scheme in _EXCLUSIVE_WRITES:
                try:
                    self._system.pipe_file(path, text.encode(), mode="create")
                    return True
                except OSError as error:
                    if not says_it_is_there(error):
                        raise
            elif not self._system.exists(path):  # a rename never replaces a file: HDFS guarantees this
                written = self._path(f".{name}-{uuid.uuid4().hex}")
                self._system.pipe_file(written, text.encode())
                with contextlib.suppress(FileExistsError):
                    self._system.mv(written, path)
                with contextlib.suppress(FileNotFoundError):
                    self._system.rm_file(written)
            return self.text(name) == text  # also true if an earlier attempt succeeded but its answer was lost

        return self._patiently(f"creating {name}", create)

    def send(self, file: Path, name: str) -> None:
        """Writes an object with a file's content. Raises StoreError; FileNotFoundError if the file is gone."""

        def write() -> None:
            before = file.stat().st_size
            if before <= _WHOLE_BYTES:
                data = file.read_bytes()
                self._system.pipe_file(self._path(name), data)
                least = most = len(data)
            else:
                self._system.put_file(str(file), self._path(name))
                least, most = before, file.stat().st_size
            stored = self._system.info(self._path(name))["size"]
            if not least <= stored <= most:
                raise ConnectionError(f"{stored} bytes arrived instead of {least}")

        try:
            self._patiently(f"writing {name}", write, size=file.stat().st_size, writes=True)
        except StoreError:
            file.stat()  # it may have gone meanwhile
            raise

    def fetch(self, name: str, file: Path, size: int) -> None:
        """Downloads an object of `size` bytes to a file, which gets its name when it is complete. Raises StoreError;
        FileNotFoundError if there is no such object.
        """

        def read() -> None:
            file.parent.mkdir(parents=True, exist_ok=True)
            with replaced(file) as temporary:
                self._system.get_file(self._path(name), str(temporary))
                if (found := temporary.stat().st_size) != size:
                    raise ConnectionError(f"{found} bytes came instead of {size}")

        self._patiently(f"reading {name}", read, missing=True, size=size)

    def piece(self, name: str, start: int, size: int) -> bytes:
        """Reads `size` bytes of an object, from `start` on. Raises StoreError; FileNotFoundError if there is none."""

        def read() -> bytes:
            found = self._system.cat_file(self._path(name), start=start, end=start + size)
            if len(found) != size:
                raise ConnectionError(f"{len(found)} bytes came instead of {size}")
            return found

        return self._patiently(f"reading {name}", read, missing=True, size=size)

    def send_all(self, files: Iterable[tuple[Path, str]]) -> None:
        """Sends several files at once. Raises the errors of `send`."""
        in_threads(self.send, files)

    def fetch_all(self, wanted: Iterable[tuple[str, Path, int]], if_there: bool = False) -> None:
        """Fetches several objects at once. if_there: skip those that are gone. Raises the errors of `fetch`."""

        def fetch(name: str, file: Path, size: int) -> None:
            with contextlib.suppress(*[FileNotFoundError] if if_there else []):
                self.fetch(name, file, size)

        in_threads(fetch, wanted)

    def remove(self, name: str) -> None:
        """Removes an object, if it is there. Raises StoreError."""
        with contextlib.suppress(FileNotFoundError):
            delete = functools.partial(self._system.rm_file, self._path(name))
            self._patiently(f"removing {name}", delete, missing=True, writes=True)

    def remove_half_sent(self, beginning: str) -> None:
        """Aborts multipart uploads that a killed process left for names with this prefix; they cost money on S3."""
        call = getattr(self._system, "call_s3", None)
        if call is None:  # other stores have none, or expire them
            return
        bucket, _, prefix = self._root.partition("/")

        def end() -> None:
            found = call("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/{beginning}")
            for upload in found.get("Uploads", ()):
                call("abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])

        with contextlib.suppress(StoreError):  # if it is not allowed, they stay
            self._patiently("ending uploads", end)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _patiently(
        self, what: str, action: Callable[[], T], missing: bool = False, size: int = 0, writes: bool = False
    ) -> T:
        """Runs `action` with retries. missing: whether to pass FileNotFoundError on to the caller; otherwise it means
        that there is no such bucket. size: bytes to transfer. writes: whether to call `allowed` before a retry.
        """
        key = object()
        self._waiting[key] = _UnderWay(what, time.monotonic(), size)
        try:
            return self._until_it_passes(what, action, missing, self.allowed if writes else None)
        finally:
            del self._waiting[key]

    def waiting(self, seconds: float) -> StoreError | None:
        """An error about an operation that has been running for more than `seconds`, if any: a store may be silent."""
        for each in list(self._waiting.values()):
            if (taken := time.monotonic() - each.begun) > seconds + each.size / _SLOW_BYTES_PER_SECOND:
                return StoreError(f"{self.url}: {each.what} has taken {taken:.0f} s so far")
        return None

    def _until_it_passes(
        self, what: str, action: Callable[[], T], missing: bool, allowed: Callable[[], None] | None
    ) -> T:
        begun, pause = time.monotonic(), _FIRST_PAUSE_SECONDS
        while True:
            try:
                return action()
            except StoreError:
                raise
            except Exception as error:
                if is_of_this_machine(error) or (missing and isinstance(error, FileNotFoundError)):
                    raise
                reason, refused = explained(error)
                patience = min(self.patience, _REFUSED_SECONDS) if refused else self.patience
                if time.monotonic() - begun + pause > patience:
                    raise StoreError(f"{self.url}: {what} failed: {reason}", refused) from None
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            if allowed:
                allowed()


def _file_system(url: str) -> tuple[Any, str]:
    """(fsspec's file system, path of the URL in it). Raises UnsupportedError, StoreError."""
    scheme = url.partition("://")[0]
    package = STORES[scheme][0]
    fsspec = optional_module("fsspec", f"{scheme}://", f"fsspec {package}")
    optional_module(package, f"{scheme}://", package)
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if scheme == "s3":
        # Few retries of its own: ours are reported. Small buffers: parts of 50 MB are held in memory.
        settings = {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 2, "mode": "standard"}}
        options |= {"config_kwargs": settings, "max_concurrency": 2}
        importlib.import_module(package).core.S3FileSystem.retries = 1
    if scheme == "gs":
        options["consistency"] = "md5"  # verifies what it has received; S3 itself refuses corrupt data
    if scheme == "webhdfs":
        options["user"] = os.environ.get("HADOOP_USER_NAME") or getpass.getuser()
    try:
        system, root = fsspec.url_to_fs(url, **options)
        if scheme == "webhdfs":  # which would wait forever
            system.session.request = functools.partial(system.session.request, timeout=_WEBHDFS_SECONDS)
        return system, root
    except Exception as error:  # each package has its own errors
        reason, refused = explained(error)
        raise StoreError(f"{url} cannot be used: {reason}", refused) from None
