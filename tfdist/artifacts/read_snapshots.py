"""Snapshots of a run for processes that only read it while it is active: copies those in an object store, and handles
snapshots that are removed meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tfdist.artifacts.manifest import MANIFEST, parse
from tfdist.artifacts.policy import Retention
from tfdist.artifacts.remote_snapshots import RemoteSnapshots
from tfdist.artifacts.snapshot_folder import Snapshot, SnapshotFolder, must_be_of
from tfdist.artifacts.stored_manifest import step_folder
from tfdist.control.exit_codes import CheckpointError
from tfdist.control.terminal import say
from tfdist.storage.object_store import ObjectStore
from tfdist.storage.reader_copy import copies_changed
from tfdist.storage.store_errors import as_sentence


def bring_for_reading(
    objects: ObjectStore | None, store: SnapshotFolder, step: int = -1, told: set[str] | None = None, after: int = -1
) -> None:
    """Brings the newest snapshot, or that of a step, if the run is in an object store and `store` lacks it. Reports
    those that are passed over, except messages in `told`, to which it adds. Raises TfdistError.

    after: the newest one is brought only if it is of a later step.
    """
    if objects is None:
        return
    told = set() if told is None else told
    with as_sentence(), copies_changed(Path(store.directory).parent):
        stored = RemoteSnapshots(objects, store, Retention(1))
        there = stored.steps()
        store.clean()  # what killed readers left
        _forget_others(objects, store, there, step)
        if step >= 0 and step not in store.steps():
            must_be_of(step, there, objects.url)
            stored.bring(step)
        elif step < 0 and max(there, default=-1) > after:
            passed_over = stored.bring_newest(there=there)
            if not passed_over:  # otherwise an older copy may be the only valid one
                _forget_removed(store, there)
            for message in passed_over:
                if message not in told:
                    say(message)
                    told.add(message)


def _forget_others(objects: ObjectStore, store: SnapshotFolder, there: Sequence[int], step: int) -> None:
    """Removes the local copy of this snapshot (-1: of the newest one `there`, in the store) if the store now has a
    different one, and copies of newer ones that the store does not have. Raises StoreError.
    """
    newest = max(there, default=-1)
    for each in store.steps():
        if each > newest or each == (newest if step < 0 else step):
            text, folder = objects.text(f"{step_folder(each)}/{MANIFEST}"), Path(store.path(each))
            with contextlib.suppress(FileNotFoundError):  # an incomplete copy is brought again in any case
                if each > newest if text is None else text.encode() != (folder / MANIFEST).read_bytes():
                    store.delete(each)


def _forget_removed(store: SnapshotFolder, there: Sequence[int]) -> None:
    """Removes local copies of snapshots before the newest one `there`, in the store, that the store no longer has."""
    for each in set(store.steps()) - set(there):
        if each < max(there):
            store.delete(each)


def read_if_there(store: SnapshotFolder, snapshot: Snapshot) -> dict[str, np.ndarray] | None:
    """Reads all arrays of a snapshot that was found valid; None if its writer has removed or replaced it since."""
    try:
        return store.read(snapshot)
    except Exception:  # TensorFlow raises various errors for files that vanish
        if _is_as_found(snapshot):
            raise
        return None


def _is_as_found(snapshot: Snapshot) -> bool:
    file = Path(snapshot.path, MANIFEST)
    try:
        return parse(file.read_text(encoding="utf-8"), str(file), snapshot.step) == snapshot.manifest
    except (OSError, ValueError, CheckpointError):
        return False
