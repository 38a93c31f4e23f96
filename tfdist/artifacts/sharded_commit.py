"""Lets the chief make one snapshot of the parts that all workers have sent to an object store (shard_upload.py).

It needs their tables of contents and their messages about files, never the data files: those have their final names.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist.artifacts.file_entry import has_content, measure
from tfdist.artifacts.manifest import FORMAT, MANIFEST, SHA, parse, sealed
from tfdist.artifacts.remote_snapshots import RemoteSnapshots
from tfdist.artifacts.shard_upload import ShardUpload, data_file, index_of, is_note, note_of
from tfdist.artifacts.sharded_snapshots import must_hold_all
from tfdist.artifacts.stored_manifest import step_folder
from tfdist.artifacts.upload_thread import UploadThread
from tfdist.control.exit_codes import CheckpointError
from tfdist.control.run_address import SNAPSHOTS
from tfdist.storage.object_store import ObjectStore
from tfdist.storage.store_errors import StoreError

_LATE_SECONDS = 600.0  # after this time a missing part is given up, if there is a newer snapshot
_SAID_SECONDS = 60.0  # after this time missing parts are reported


class ShardedCommit:
    """On the chief: the list of snapshots still to be made of parts, and their making.

    parts: the chief's own. remote: the snapshots in the store, to which finished ones are added.
    """

    def __init__(self, objects: ObjectStore, parts: ShardUpload, remote: RemoteSnapshots):
        self._objects, self._parts, self._remote = objects, parts, remote
        remote.made_of_parts = True
        self._steps: list[int] = []  # not yet committed, in the order of saving: the first is being gathered
        self._dropped: set[int] = set()  # steps with possible leftovers in the store
        self._since: dict[int, float] = {}  # step -> when the chief's own part was there (time.monotonic())
        self._lists, self._making = (
            threading.Lock(),
            threading.Lock(),
        )  # the second is held while the store works
        self._lost = -1  # the newest step whose snapshot was lost, if none newer has been made
        self.sender = UploadThread(self.steps, self._make_first, self.lost)

    def steps(self) -> list[int]:
        """The steps whose snapshots are to be made."""
        return list(self._steps)

    def lost(self) -> list[int]:
        """The step of the newest snapshot, if that is lost."""
        return [self._lost] if self._lost >= 0 else []

    def announce(self, step: int) -> list[int]:
        """Begins a save. Returns the steps whose parts are wanted: the one that is being gathered (otherwise a store
        slower than the saves would never complete one), the newest, and the last in the store. Raises StoreError.
        """
        if step in self._steps or step in self._dropped or self._remote.holds(step):
            with self._making:  # it is written again, after bad numbers
                self._remote.withdraw(step)
        with self._lists:
            waiting = [each for each in self._steps if each != step]
            self._steps = [*waiting[:1], *waiting[1:][-1:], step]
            self._dropped = self._dropped.union(waiting) - set(self._steps)
            newest = self._remote.newest()
            return [*self._steps, *([newest] if newest >= 0 else [])]

    def make_left(self, newer_than: int) -> None:
        """Makes the newest snapshot whose parts earlier processes have all sent, before anything is removed from the
        store. Raises StoreError, OSError."""
        names = self._objects.names(SNAPSHOTS)
        steps = {int(name.split("/")[1][5:]) for name in names if name.endswith(f"/{note_of(0)}")}
        for step in sorted((step for step in steps if step > newer_than), reverse=True):
            with contextlib.suppress(CheckpointError):
                if not self.make(step):
                    break

    def drop_all(self) -> None:
        """Drops all snapshots that are being gathered, as none is wanted any more."""
        with self._making:
            for step in self.steps():
                self._is_over(step, dropped=True)

    def _make_first(self) -> None:
        """Makes the first waiting snapshot if all its parts are there. Runs in a thread. Raises StoreError, OSError."""
        with self._making:
            for step in self.steps()[:1]:
                if step in self._parts.sent:
                    self._make_or_drop(step, self._parts.stamp(step))

    def _make_or_drop(self, step: int, stamp: str) -> None:
        began = self._since.setdefault(step, time.monotonic())
        try:
            missing = self.make(step, stamp)
        except CheckpointError as error:
            self._is_over(step, dropped=True)
            self._lost = max(self._lost, step)
            raise StoreError(f"there is no snapshot of step {step}: {error}") from None
        if not missing:
            self._is_over(step, dropped=False)
            self._lost = self._lost if self._lost > step else -1
            with self._lists:  # the run has gone back past later steps: it makes snapshots in the order of saving
                self._dropped = self._dropped | self._remote.abandoned(step)
            for each in list(self._dropped):
                self._remote.remove(each)
                self._dropped.discard(each)
            self._remote.retain()
            return
        if (waited := time.monotonic() - began) > _LATE_SECONDS and len(self._steps) > 1:
            self._is_over(step, dropped=True)
        if waited > _SAID_SECONDS:
            ranks = ", ".join(map(str, missing))
            raise StoreError(
                f"the shards of ranks {ranks} of the snapshot of step {step} have not arrived in {waited:.0f} s"
            )

    def _is_over(self, step: int, dropped: bool) -> None:
        with self._lists:
            self._steps = [each for each in self._steps if each != step]
            self._since.pop(step, None)
            self._dropped = self._dropped | {step} if dropped else self._dropped - {step}

    def make(self, step: int, stamp: str = "") -> list[int]:
        """Makes one snapshot, of parts with this stamp, by default the stamp of the chief's part. Returns the ranks
        whose parts are missing; if there are any, there is no snapshot yet. Raises CheckpointError if there will be
        none, StoreError, OSError."""
        there = self._objects.names(step_folder(step))
        first = self._note(step, 0, there)
        if first is None or stamp not in ("", first["stamp"]):
            return [0]
        count = first["workers"]
        if missing := [rank for rank in range(count) if f"{step_folder(step)}/{note_of(rank)}" not in there]:
            return missing
        found = {rank: self._note(step, rank, there) for rank in range(count)}
        missing = [rank for rank, note in found.items() if note is None or note["stamp"] != first["stamp"]]
        notes = [note for note in found.values() if note]
        if failed := [note["error"] for note in notes if "error" in note and note["stamp"] == first["stamp"]]:
            raise CheckpointError(f"{failed[0]}: free or repair the working copy of that worker.")
        if missing := missing or [rank for rank in range(count) if not _is_there(step, rank, notes[rank], there)]:
            return missing
        self._commit(step, notes)
        return []

    def _note(self, step: int, rank: int, there: Mapping[str, int]) -> dict[str, Any] | None:
        """The message of a worker about its part; None if there is none yet."""
        name = f"{step_folder(step)}/{note_of(rank)}"
        text = self._objects.text(name) if name in there else None
        try:
            note = json.loads(text or "")
        except (ValueError, RecursionError):
            return None
        return note if is_note(note, rank) else None

    def _commit(self, step: int, notes: list[dict[str, Any]]) -> None:
        fields, room = notes[0]["fields"], Path(self._parts.directory)
        room.mkdir(parents=True, exist_ok=True)
        try:
            must_hold_all([note["values"] for note in notes], fields)
        except OSError as error:
            raise CheckpointError(f"{error}.") from None
        with tempfile.TemporaryDirectory(dir=room, prefix=".writing-") as folder:
            index = self._merged(Path(folder), step, notes)
            files = {data_file(step, rank, len(notes)): note["data"] for rank, note in enumerate(notes)}
            files[f"state-{step}.index"] = measure(str(index), SHA, flush=False)
            text = sealed({"format": FORMAT, "step": step, **fields, "files": files})
            manifest = parse(text, MANIFEST, step)
            self._objects.send(index, f"{step_folder(step)}/{index.name}")
            self._remote.commit(step, text, manifest)
            self._keep_here(step, index)
        for rank in range(len(notes)):
            self._objects.remove(f"{step_folder(step)}/{note_of(rank)}")
            self._objects.remove(f"{step_folder(step)}/{index_of(rank)}")

    def _merged(self, folder: Path, step: int, notes: list[dict[str, Any]]) -> Path:
        """Merges the tables of contents into one. Raises CheckpointError, StoreError, OSError."""
        prefixes = []
        for rank, note in enumerate(notes):
            prefixes.append(f"{folder}/part-{rank:05d}")
            index = Path(f"{prefixes[-1]}.index")
            self._objects.fetch(f"{step_folder(step)}/{index_of(rank)}", index, note["index"]["bytes"])
            if not has_content(str(index), note["index"]):
                raise CheckpointError(f"the table of contents of rank {rank}'s shard is damaged.")
            # TensorFlow renames the data files; these stand-ins only show which one is whose.
            Path(f"{prefixes[-1]}.data-00000-of-00001").write_text(str(rank))
        try:
            prefix = f"{folder}/state-{step}"
            tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=prefixes, destination_prefix=prefix, delete_old_dirs=False
            )
        except tf.errors.OpError as error:
            raise CheckpointError(f"the shards do not form a snapshot ({error.message}).") from None
        for rank in range(len(notes)):
            assert (folder / data_file(step, rank, len(notes))).read_text() == str(rank), "they are in another order"
        return folder / f"state-{step}.index"

    def _keep_here(self, step: int, index: Path) -> None:
        """Keeps the table of contents here, so that resuming on this machine is quick."""
        folder = Path(self._parts.path(step))
        if folder.is_dir():
            os.replace(index, folder / index.name)


def _is_there(step: int, rank: int, note: Mapping[str, Any], there: Mapping[str, int]) -> bool:
    """Whether a part's files are in the store as its message says."""
    names = {data_file(step, rank, note["workers"]): note["data"], index_of(rank): note["index"]}
    return all(there.get(f"{step_folder(step)}/{name}") == entry["bytes"] for name, entry in names.items())
