"""Sends a folder's changed files to an object store, at intervals and at the end.

For files that grow or are rewritten: logs, event files, curves, exports. Snapshots are sent separately
(artifacts/remote_snapshots.py).
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from tfdist.storage.folder_walk import is_plain
from tfdist.storage.object_store import ObjectStore
from tfdist.storage.store_errors import StoreError
from tfdist.storage.store_lease import FILE as LEASE

_PERIOD_SECONDS = 20.0

_WRITTEN_ANEW = (".json", ".txt")  # rewritten, maybe with other content of the same size; other files grow


class FolderMirror:
    """Sends those files of `folder` that belong to this process: `owns` decides by name.

    last: a file that is sent when all others are there, and only at the end. on_round: called in a thread after each
    round, with its error if it failed, else None. allowed: called before a round; may raise StoreError.
    """

    def __init__(
        self,
        objects: ObjectStore,
        folder: Path,
        owns: Callable[[str], bool],
        last: str,
        on_round: Callable[[StoreError | None], None],
        allowed: Callable[[], None] = lambda: None,
    ):
        self._allowed = allowed
        self._objects, self._folder, self._owns, self._last, self._on_round = objects, folder, owns, last, on_round
        self._sent: dict[str, tuple[int, int]] = {}  # name -> (time of the last change in ns, bytes)
        self._one_at_a_time = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="tfdist-mirror", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _keep(self) -> None:
        while not self._ended.wait(_PERIOD_SECONDS):
            try:
                self.send()
                self._on_round(None)
            except StoreError as error:
                self._on_round(error)
            except OSError as error:  # of the local disk
                self._on_round(StoreError(f"{self._folder} cannot be read ({error})"))

    def finish(self, with_last: bool) -> None:
        """Sends all that is left. Raises StoreError."""
        self._ended.set()
        self.send()
        if with_last and (self._folder / self._last).is_file() and self._owns(self._last):
            self._objects.send(self._folder / self._last, self._last)

    def send(self, wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Sends the changed files whose names are `wanted`. Raises StoreError."""
        self._allowed()
        with self._one_at_a_time:
            for name, state in self._changed(wanted).items():
                try:
                    self._objects.send(self._folder / name, name)
                except FileNotFoundError:
                    continue
                self._sent[name] = state

    def _changed(self, wanted: Callable[[str], bool]) -> dict[str, tuple[int, int]]:
        found = {}
        for name in files_below(self._folder):
            if name != self._last and self._owns(name) and wanted(name):
                try:
                    status = (self._folder / name).lstat()
                except FileNotFoundError:
                    continue
                state = (status.st_mtime_ns, status.st_size)
                if self._sent.get(name) != state:
                    found[name] = state
        return found


def files_below(folder: Path, inner: str = "") -> Iterator[str]:
    """Names of the files in a folder and its subfolders; no links, no pipes, nothing whose name begins with a dot."""
    try:
        entries = sorted(os.scandir(folder / inner), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        name = f"{inner}/{entry.name}" if inner else entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from files_below(folder, name)
        else:
            with contextlib.suppress(FileNotFoundError):  # removed just now
                if stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                    yield name


def bring_files(objects: ObjectStore, folder: Path, wanted: Callable[[str], bool], longer: bool = False) -> None:
    """Brings the objects whose names are `wanted` to a folder. Raises StoreError.

    longer: only those that are missing here, or shorter here; otherwise all that differ in size, or are rewritten.
    """

    def differs(name: str, size: int) -> bool:
        try:
            here = (folder / name).stat().st_size
        except FileNotFoundError:
            return True
        return size > here if longer else size != here or name.endswith(_WRITTEN_ANEW)

    found = {name: size for name, size in objects.names().items() if name != LEASE and is_plain(name) and wanted(name)}
    wanted_now = [(name, folder / name, size) for name, size in found.items() if differs(name, size)]
    objects.fetch_all(wanted_now, if_there=True)  # it may have been removed since the listing
