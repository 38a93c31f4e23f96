"""Snapshots of a run in an object store, for those who only read it: copies of them on this machine."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from tfdist.artifacts.manifest import MANIFEST
from tfdist.artifacts.policy import Retention
from tfdist.artifacts.remote_snapshots import RemoteSnapshots, step_folder
from tfdist.artifacts.snapshot_folder import SnapshotFolder, must_be_of
from tfdist.control.terminal import say
from tfdist.storage.object_store import ObjectStore
from tfdist.storage.reader_copy import copies_changed
from tfdist.storage.store_errors import as_sentence


def bring_for_reading(
    objects: ObjectStore | None, store: SnapshotFolder, step: int = -1, told: set[str] | None = None
) -> None:
    """Brings a run's newest snapshot, or that of a step, if the run is in an object store and it is not in `store`;
    tells of those that are passed over, but for what is among `told`, to which it adds. Raises TfdistError.
    """
    if objects is None:
        return
    told = set() if told is None else told
    with as_sentence(), copies_changed(Path(store.directory).parent):
        stored = RemoteSnapshots(objects, store, Retention(1))
        there = stored.steps()
        _forget_others(objects, store, there, step)
        if step < 0:
            for message in stored.bring_newest(there=there):
                if message not in told:
                    say(message)
                    told.add(message)
        elif step not in store.steps():
            must_be_of(step, there, objects.url)
            stored.bring(step)


def _forget_others(objects: ObjectStore, store: SnapshotFolder, there: Sequence[int], step: int) -> None:
    """Removes the copy of this snapshot (-1: of the newest `there`, in the store) if it is another by now, and copies
    of newer ones, if the store has none. Raises StoreError.
    """
    newest = max(there, default=-1)
    for each in store.steps():
        if each > newest or each == (newest if step < 0 else step):
            text, folder = objects.text(f"{step_folder(each)}/{MANIFEST}"), Path(store.path(each))
            with contextlib.suppress(FileNotFoundError):  # another reader has removed it
                if each > newest if text is None else text.encode() != (folder / MANIFEST).read_bytes():
                    shutil.rmtree(folder, ignore_errors=True)
