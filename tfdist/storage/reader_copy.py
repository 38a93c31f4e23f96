"""Runs in object stores, for processes that only read them: they use their own copy on this machine, separate from the
working copy, which belongs to the run alone. A run in a folder is read in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from tfdist.control.own_files import lock, remove_tree
from tfdist.control.run_address import cache_folder, check_address, is_url, working_folder
from tfdist.control.status_file import STATUS_FILE, parse_status
from tfdist.storage.mirror import FolderMirror, bring_files
from tfdist.storage.object_store import ObjectStore
from tfdist.storage.store_errors import as_sentence

_NOT_BROUGHT = ("checkpoints/", "export/")


@contextlib.contextmanager
def copies_changed(folder: Path) -> Iterator[None]:
    """Context manager in which no other reader on this machine changes the copies in `folder`. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with lock(folder.with_name(f".{folder.name}.lock"), wait=True):
        yield


class ReadRun:
    """The run at `place`, a folder or a URL. flag: the flag by which it was given.

    Attributes: folder, in which it is read; objects, the store's objects; None for a run in a folder. Raises
    TfdistError.
    """

    def __init__(self, place: str, cache_dir: str = "", flag: str = "run_dir"):
        check_address(flag, place)
        self.place, self.objects, self._flag = place, None, flag
        self.folder = Path(place)
        if is_url(place):
            with as_sentence(self._flag):
                self.folder = working_folder(place, str(cache_folder(cache_dir) / "readers"))
                self.folder.mkdir(0o700, parents=True, exist_ok=True)
                self.objects = ObjectStore(place)

    def bring(self) -> Path:
        """Updates the folder's files, except snapshots and exports, and returns it. Raises TfdistError."""
        if self.objects:
            with as_sentence(self._flag), copies_changed(self.folder):
                self._forget_another_run(self.objects)
                bring_files(self.objects, self.folder, lambda name: not name.startswith(_NOT_BROUGHT))
        return self.folder

    def _forget_another_run(self, objects: ObjectStore) -> None:
        """Removes the copy of another run that was in the store before, with its snapshots."""
        status = self.folder / STATUS_FILE
        here = parse_status(status.read_text("utf-8", "replace")).get("run_id") if status.exists() else ""
        there = parse_status(objects.text(STATUS_FILE) or "").get("run_id")
        if here and there and here != there:
            for entry in self.folder.iterdir():
                remove_tree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)

    def text(self, name: str) -> str:
        """The current text of a file; "" if it does not exist. Raises TfdistError."""
        if self.objects:
            with as_sentence(self._flag):
                return self.objects.text(name) or ""
        try:
            return (self.folder / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def send_back(self, made: Callable[[str], bool]) -> None:
        """Sends files in the folder whose names satisfy `made` to the run's store. Raises TfdistError."""
        if self.objects:
            with as_sentence(self._flag):
                FolderMirror(self.objects, self.folder, made, last="", on_round=lambda trouble: None).finish(
                    with_last=False
                )
