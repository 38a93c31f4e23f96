"""Runs in object stores as those see them who only read: a copy of their own on this machine, beside the working copy,
which belongs to the run alone. Of a run in a folder that folder itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tfdist.control.run_address import cache_folder, check_address, is_url, working_folder
from tfdist.storage.mirror import FolderMirror, bring_files
from tfdist.storage.object_store import ObjectStore
from tfdist.storage.store_errors import as_sentence

_NOT_BROUGHT = ("checkpoints/", "export/")


def reading_folder(place: str, cache_dir: str = "") -> Path:
    """The folder in which the run at `place` is read."""
    return working_folder(place, str(cache_folder(cache_dir) / "readers")) if is_url(place) else Path(place)


def for_reading(place: str, cache_dir: str = "") -> Path:
    """That folder, the files of the run brought anew, without its snapshots and exports. Raises TfdistError."""
    check_address("run_dir", place)
    folder = reading_folder(place, cache_dir)
    if is_url(place):
        with as_sentence():
            folder.mkdir(0o700, parents=True, exist_ok=True)
            bring_files(ObjectStore(place), folder, lambda name: not name.startswith(_NOT_BROUGHT))
    return folder


def text_of(place: str, name: str) -> str:
    """One file of a run as it is now; "" if it is not there. Raises TfdistError."""
    if is_url(place):
        with as_sentence():
            return ObjectStore(place).text(name) or ""
    try:
        return (Path(place) / name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def send_back(place: str, folder: Path, made: Callable[[str], bool]) -> None:
    """Puts files that were `made` in the copy of a run in a store beside it. Raises TfdistError."""
    if is_url(place):
        with as_sentence():
            FolderMirror(ObjectStore(place), folder, made, last="", told=lambda trouble: None).finish(with_last=False)
