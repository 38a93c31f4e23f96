"""Snapshots of a run in an object store: sent there from the working copy by a thread, and brought back.

In the store a snapshot has the same files under the same names. Its manifest is written last and removed first: without
it nothing is trusted, and with it every file is compared with its checksum before it is used. Training never waits for
the store; a snapshot that could not be sent stays in the working copy and is sent later.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.artifacts.checkpoint_files import pointer
from tfdist.artifacts.manifest import MANIFEST, parse
from tfdist.artifacts.policy import ALL_STEPS, Retention, ScheduledSteps
from tfdist.artifacts.snapshot_folder import SnapshotFolder
from tfdist.artifacts.stored_manifest import step_folder, whole_manifest
from tfdist.artifacts.upload_thread import UploadThread
from tfdist.control.exit_codes import CheckpointError
from tfdist.control.own_files import remove_tree
from tfdist.control.run_address import SNAPSHOTS
from tfdist.storage.object_store import ObjectStore
from tfdist.storage.store_errors import StoreError

_OBJECT = re.compile(rf"^{SNAPSHOTS}/step-(\d{{8,19}})/([^/]+)$")
_SENDING = ".sending-"
_DAMAGED = "damaged-manifest.json"  # the new name of a damaged snapshot's manifest


class RemoteSnapshots:
    """The snapshots below `objects`, and the thread that sends those of `store` there.

    retention: what is kept in the store. The thread calls two functions, which may raise StoreError: `allowed` before
    it writes or removes anything there, and `before` when a snapshot is about to be committed. made_of_parts: new
    snapshots are made in the store (sharded_commit.py): those of `store` are older.
    """

    made_of_parts = False

    def __init__(
        self,
        objects: ObjectStore,
        store: SnapshotFolder,
        retention: Retention,
        allowed: Callable[[], None] = lambda: None,
        before: Callable[[], None] = lambda: None,
    ):
        self._objects, self._store, self._retention = objects, store, retention
        self._allowed, self._before = allowed, before
        self._there: dict[int, Mapping[str, float]] = {}  # step -> its metrics, for snapshots in the store
        self._manifests: dict[int, str] = {}  # step -> the text of its manifest, likewise
        self._passed_over: dict[int, str] = {}  # step -> the manifest of one here that is not sent: damaged, or too old
        self.damaged_there: dict[int, str] = {}  # step -> why: damaged in the store, and passed over
        self.sender = UploadThread(self.unsent, self._send_newest)

    # -- bringing --------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps of complete snapshots in the store, judged by file names, oldest first. Raises StoreError."""
        return sorted(step for step, files in self._inventory().items() if MANIFEST in files)

    def all_steps(self) -> list[int]:
        """The steps of all snapshots in the store, complete or not. Raises StoreError."""
        return sorted(self._inventory())

    def bring_newest(self, scheduled: ScheduledSteps = ALL_STEPS, there: Sequence[int] | None = None) -> list[str]:
        """Brings the newest complete snapshot of the `scheduled` steps, if the working copy has none that is as new.
        there: the result of `steps`. Returns why others were passed over. Raises StoreError.
        """
        messages: list[str] = []
        local, _ = self._store.newest_valid(scheduled)
        for step in filter(scheduled, reversed(self.steps() if there is None else there)):
            if local and local.step >= step:
                break
            if step in self.damaged_there:
                continue
            try:
                self.bring(step)
                break
            except CheckpointError as error:
                messages.append(f"skipped a snapshot of {self._objects.url}: {error}")
                self.damaged_there[step] = str(error)
        return messages

    def bring(self, step: int) -> None:
        """Brings one snapshot. Raises CheckpointError if it is damaged, StoreError."""
        name = step_folder(step)
        text, manifest = whole_manifest(self._objects, step, self._store.options.required)
        folder = Path(self._store.directory) / f".writing-step-{step:08d}-{uuid.uuid4().hex[:8]}"
        final = Path(self._store.path(step))
        folder.mkdir(parents=True)
        try:
            self._objects.fetch_all(
                (f"{name}/{file}", folder / file, entry["bytes"]) for file, entry in manifest["files"].items()
            )
            (folder / MANIFEST).write_text(text, encoding="utf-8")
            if final.exists():  # it is damaged, otherwise none would be brought
                remove_tree(final)
            folder.rename(final)
        except FileNotFoundError as error:
            raise CheckpointError(f"{name} is incomplete ({error}).") from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        try:
            self._store.verify(step)
        except CheckpointError:
            remove_tree(final)
            raise

    def _inventory(self) -> dict[int, dict[str, int]]:
        """step -> {file: bytes} of everything in the store, complete or not."""
        found: dict[int, dict[str, int]] = {}
        for name, size in self._objects.names(SNAPSHOTS).items():
            if match := _OBJECT.match(name):
                found.setdefault(int(match.group(1)), {})[match.group(2)] = size
        return found

    # -- sending ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Removes leftovers of killed senders, sets damaged snapshots aside, and starts sending. Call only while no
        other process writes there, and when something is chosen to resume from: a place in which all snapshots are
        damaged must not look empty. Raises StoreError.
        """
        for entry in Path(self._store.directory).parent.glob(f"{_SENDING}*"):
            remove_tree(entry)
        for step, files in self._inventory().items():
            if MANIFEST not in files:
                if _DAMAGED not in files:
                    self.remove(step)
            elif step in self.damaged_there or not self._find(step):
                self.set_aside(step)
            else:
                for file in files.keys() - self._files(step):  # parts of which it was made
                    self._objects.remove(f"{step_folder(step)}/{file}")
        self._objects.remove_half_sent(f"{SNAPSHOTS}/")
        self._pass_over_old_ones()
        self.sender.start()

    def _pass_over_old_ones(self) -> None:
        """Excludes those here from sending that need not be kept: the run has gone on elsewhere meanwhile."""
        texts, metrics = dict[int, str](), dict[int, Mapping[str, float]]()
        for step in self.unsent():
            with contextlib.suppress(OSError, CheckpointError):  # a damaged one is told when it is sent
                text = _manifest_in(self._store.path(step))
                metrics[step] = parse(text, MANIFEST, step).get("metrics") or {}
                texts[step] = text
        metrics |= self._there
        for step in self._retention.to_delete(metrics, metrics):
            if step in texts:
                self._passed_over[step] = texts[step]

    def _find(self, step: int) -> bool:
        """Remembers a snapshot in the store; returns False if its manifest is damaged."""
        text = self._objects.text(f"{step_folder(step)}/{MANIFEST}") or ""
        with contextlib.suppress(CheckpointError):
            self._there[step] = parse(text, MANIFEST, step).get("metrics") or {}
            self._manifests[step] = text
        return step in self._there

    def _files(self, step: int) -> set[str]:
        """The names of all files of a remembered snapshot. Raises CheckpointError for another one."""
        return {MANIFEST, *parse(self._manifests.get(step, ""), MANIFEST, step)["files"]}

    def set_aside(self, step: int) -> None:
        """Excludes a damaged snapshot from those that are kept, without removing its data. Raises StoreError."""
        self._there.pop(step, None)
        self.damaged_there.pop(step, None)
        manifest = f"{step_folder(step)}/{MANIFEST}"
        self._objects.put_text(f"{step_folder(step)}/{_DAMAGED}", self._objects.text(manifest) or "")
        self._objects.remove(manifest)

    def unsent(self) -> list[int]:
        """Steps whose snapshots are here, but not in the store, and are to be sent; oldest first."""
        return [step for step in self._store.steps() if not self._is_done(step)]

    def _is_done(self, step: int) -> bool:
        """Whether exactly this snapshot is there, or passed over: after a rollback a step may be saved again, with
        other numbers."""
        done = [self._passed_over.get(step), self._manifests.get(step) if step in self._there else None]
        if done == [None, None]:
            return False
        try:
            return _manifest_in(self._store.path(step)) in done
        except OSError:  # it has been deleted here
            return True

    def _send_newest(self) -> None:
        """Sends the newest unsent snapshot, from which a start elsewhere would resume. Raises StoreError, OSError."""
        for step in self.unsent()[-1:]:
            self._allowed()
            self._send(step)
            self._allowed()
            self._remove_abandoned()
            self.retain()

    def _send(self, step: int) -> None:
        """Sends one snapshot. Raises StoreError, OSError."""
        copy = Path(self._store.directory).parent / f"{_SENDING}{step}-{uuid.uuid4().hex[:8]}"
        try:
            try:  # links, so that no one deletes it meanwhile
                shutil.copytree(self._store.path(step), copy, copy_function=_linked)
            except OSError as error:  # shutil.Error, a subclass, collects the errors of all files
                if not os.path.exists(os.path.join(self._store.path(step), MANIFEST)):
                    return  # it has been deleted, like other old snapshots
                raise StoreError(f"the snapshot of step {step} cannot be read, or does not fit here: {error}") from None
            text = _manifest_in(copy)
            manifest, name = parse(text, str(copy / MANIFEST), step), step_folder(step)
            self._objects.remove(f"{name}/{MANIFEST}")
            self._objects.send_all((copy / file, f"{name}/{file}") for file in manifest["files"])
            self.commit(step, text, manifest)
        except CheckpointError as error:
            self._passed_over[step] = _manifest_in(copy)
            raise StoreError(f"a snapshot was not sent: {error}") from None
        finally:
            shutil.rmtree(copy, ignore_errors=True)

    def commit(self, step: int, text: str, manifest: Mapping[str, Any]) -> None:
        """Writes the manifest of a snapshot when all other files are there. Raises StoreError."""
        self._before()
        self._allowed()
        self._objects.put_text(f"{step_folder(step)}/{MANIFEST}", text)
        self._there[step], self._manifests[step] = manifest.get("metrics") or {}, text
        if step == max(self._there):
            self._point_to(step)

    def _point_to(self, step: int) -> None:
        """Lets TensorFlow's `checkpoint` file name a snapshot. Raises StoreError."""
        self._objects.put_text(f"{SNAPSHOTS}/checkpoint", pointer(f"step-{step:08d}/state-{step}"))

    def withdraw(self, step: int) -> None:
        """Withdraws a snapshot that is about to be written again, or removed: it is no longer trusted, nor the one that
        TensorFlow finds. Raises StoreError."""
        others = set(self._there) - {step}
        if step == self.newest() and others:
            self._point_to(max(others))
        self._there.pop(step, None)
        self._objects.remove(f"{step_folder(step)}/{MANIFEST}")

    def holds(self, step: int) -> bool:
        """Whether the snapshot is there, as far as is known here."""
        return step in self._there

    def newest(self) -> int:
        """The step of the newest snapshot there; -1 without any."""
        return max(list(self._there), default=-1)

    def retain(self) -> None:
        """Removes the snapshots that need not be kept. Raises StoreError."""
        for step in self._retention.to_delete(self._there, self._there):
            if not os.path.isdir(self._store.path(step)):  # otherwise it would be sent again
                self.remove(step)

    def _remove_abandoned(self) -> None:
        """Removes the snapshots after the newest one here, once that is there, too. Raises StoreError."""
        newest = max(self._store.steps(), default=-1)
        if newest in self._there and not self.made_of_parts:
            for step in self.abandoned(newest):
                self.remove(step)

    def abandoned(self, newest: int) -> set[int]:
        """The steps of the snapshots there after `newest`, the run's last one: the run has gone back past them, and
        nobody must resume from them. Without those that are kept for ever."""
        there = list(self._there)
        return {step for step in there if step > newest} - self._retention.kept_for_ever(there, self._there)

    def remove(self, step: int) -> None:
        """Removes a snapshot, manifest first: killed midway, it leaves nothing that is trusted. Raises StoreError."""
        files = {os.path.basename(file) for file in self._objects.names(step_folder(step))}
        with contextlib.suppress(CheckpointError):  # a listing may be outdated
            files |= self._files(step)
        self.withdraw(step)
        for file in files - {MANIFEST}:
            self._objects.remove(f"{step_folder(step)}/{file}")


def _manifest_in(folder: str | Path) -> str:
    """The text of the manifest of a snapshot here; damaged bytes become others, with which no checksum agrees. Raises
    OSError."""
    return Path(folder, MANIFEST).read_text(encoding="utf-8", errors="replace")


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without links
        shutil.copyfile(source, target, follow_symlinks=False)
