"""The files of a run's snapshots and backups: where they are, and who writes them.

Only the chief touches the files, unless the state is sharded over a mesh and all workers see the same folder, or the
run is in an object store: then every worker writes and reads its own part (artifacts/sharded_snapshots.py,
remote_shards.py).

The calls when a run resumes: Session._restore -> Recovery.restore -> _picked_by_chief -> _from_files ->
SnapshotFiles.bring_and_pick -> restore.pick_snapshot -> SnapshotFolder.newest_valid.
"""

from __future__ import annotations

import contextlib
import math
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tfdist.artifacts import restore
from tfdist.artifacts.backup_folder import BackupFolder
from tfdist.artifacts.manifest import CRC, SHA
from tfdist.artifacts.policy import ALL_STEPS, Retention, ScheduledSteps
from tfdist.artifacts.run_identity import run_of
from tfdist.artifacts.sharded_snapshots import ShardedSnapshotFolder
from tfdist.artifacts.snapshot_folder import FolderOptions, Snapshot, SnapshotFolder
from tfdist.artifacts.writer import SnapshotWriter
from tfdist.config import Config
from tfdist.control.faults import Faults
from tfdist.control.lease import Lease
from tfdist.control.run_address import SNAPSHOTS, is_url
from tfdist.run import local_backup
from tfdist.run.remote_backup import RemoteBackup
from tfdist.run.remote_run import RemoteRun
from tfdist.run.remote_shards import RemoteShards
from tfdist.runtime.base import Runtime
from tfdist.runtime.decisions import every_worker
from tfdist.storage.store_errors import as_sentence
from tfdist.training.parallel.sharded_state import ShardedState

_LAST_WRITE_SECONDS = 10.0  # after an error: how long to wait for a snapshot that is being written
_FINISH_SECONDS = 60.0  # how long a run that goes back waits for snapshots under way
_LAST_PART_SECONDS = 2.0  # how long to wait for the part of a worker that may be gone


class SnapshotFiles:
    """The snapshots and backups of a run, as one worker sees them.

    in_parts: whether this worker writes and reads a part of each snapshot.
    writer: None if another worker writes all. backup: None without --backup_dir.
    """

    def __init__(self, folder: Path, whole_config: Config, faults: Faults, writes: bool, stored: RemoteRun | None):
        config = whole_config.checkpoint
        options = FolderOptions(
            place=stored.snapshots if stored else "", required=restore.REQUIRED, checksum=SHA if stored else CRC
        )
        self.store = SnapshotFolder(str(folder / SNAPSHOTS), lambda step: faults.at("save", step), options)
        self._config, self._writes = config, writes  # writes: whether this is the chief
        self._scheduled = restore.scheduled(whole_config)
        self._parted: ShardedSnapshotFolder | None = None
        self._in_store: RemoteShards | None = None
        self._refused: list[str] = []  # why snapshots were refused
        self._last_refusal = ""  # of the last save; "": it was not refused
        self.writer = self._make_writer(attempts=2) if writes else None
        self.backup: BackupFolder | None = None
        self._stored_backup: RemoteBackup | None = None
        self._backup_lease: Lease | None = None
        if config.backup_dir:
            self.backup = local_backup.folder(whole_config, writes)
            if writes and is_url(config.backup_dir):
                self._stored_backup = RemoteBackup(whole_config, self.backup, run_of(folder))
            elif writes:
                self._backup_lease = local_backup.lease(config.backup_dir, folder)
        self._stored = stored
        self._sent = stored.sends(self.store, self._retention()) if stored and writes else None
        self._sends = False  # whether the sending thread has started

    def bring_and_pick(self, config: Config, back: bool) -> tuple[Snapshot | None, list[str]]:
        """Picks the snapshot to resume from, as restore.pick_snapshot does, among those here and in the run's object
        store if it has one. back: after bad numbers. Called on the chief. Raises CheckpointError, and errors of a
        failing store.
        """
        steps = self._scheduled if back else ALL_STEPS
        self.store.clean()
        passed_over = self._begin_backup()
        if self.backup:  # otherwise one may be read while it is being replaced, and which one would be chance
            self.backup.writer.wait()
            if not self._stored_backup:
                self.backup.store.clean()
        if self._in_store:
            snapshot, messages = self._pick_of_parts(self._in_store, config, steps, passed_over)
        else:
            # At a later call, after bad numbers, all that this run has written is here, and a failing store must not
            # end it.
            passed_over += [] if self._sends else self._bring_newest()
            snapshot, messages = restore.pick_snapshot(self.store, config, self.stores()[1:], steps, passed_over)
            self._set_aside_damaged(snapshot)
            self.begin_to_send()  # only now: it sets aside what is damaged in the store
        if back and snapshot:
            # Snapshots of parts are removed from the store when the next one is there.
            of_run = None if self._in_store else self.writer
            for writer in filter(None, (of_run, self.backup and self.backup.writer)):
                writer.delete_after(snapshot.step)
        return snapshot, messages

    def _pick_of_parts(
        self, in_store: RemoteShards, config: Config, steps: ScheduledSteps, passed_over: list[str]
    ) -> tuple[Snapshot | None, list[str]]:
        """Chooses from the store, also after bad numbers: no machine has all of a snapshot."""
        assert self._sent
        with as_sentence():
            if self._sends:
                in_store.finish_or_drop(_FINISH_SECONDS)
            else:
                in_store.make_left()
            snapshot, messages = restore.pick_snapshot(in_store.reads, config, self.stores(), steps, passed_over)
            self._set_aside_damaged(snapshot)
            if not self._sends:
                self.begin_to_send()
                in_store.start()
        return snapshot, messages

    def _set_aside_damaged(self, chosen: Snapshot | None) -> None:
        parts = [self._in_store.reads] if self._in_store else []
        for store in [*parts, *self.stores()] if chosen else ():
            store.set_aside_damaged()

    def _bring_newest(self) -> list[str]:
        """Brings the newest snapshot from an object store, if there is one. Returns messages on damaged ones."""
        messages = []
        if self._sent:
            with as_sentence():
                messages = self._sent.bring_newest()
                if self._scheduled.periods:  # to go back to after bad numbers, when the store is not asked
                    messages += self._sent.bring_newest(self._scheduled)
        return messages

    def _begin_backup(self, even_if_full: bool = False) -> list[str]:
        """Takes the lease of the backup for this job (even_if_full: see Lease.take), and brings the backup from its
        object store. Returns messages on damaged ones. Raises TfdistError."""
        if self._backup_lease and not self._backup_lease.is_taken:
            self._backup_lease.take(even_if_full)
        return self._stored_backup.bring() if self._stored_backup else []

    def begin_to_send(self, even_if_full: bool = False) -> None:
        """Starts sending what is written here to the object stores, if there are any. Raises TfdistError."""
        self._begin_backup(even_if_full)
        if self._stored_backup:
            self._stored_backup.start()
        if self._sent and not self._sends:
            with as_sentence():
                self._sent.start()
            self._sends = True

    @property
    def in_parts(self) -> bool:
        return self._parted is not None or self._in_store is not None

    def is_own(self, snapshot: Snapshot) -> bool:
        """Whether this is a snapshot of the run itself, not a backup, which is deleted when the run has finished."""
        store = self._in_store.reads if self._in_store else self.store
        return snapshot.path == store.path(snapshot.step)

    def is_shared(self, snapshot: Snapshot) -> bool:
        """Whether every worker can read its part of the snapshot: a backup is only on the chief's machine."""
        return self.in_parts and self.is_own(snapshot)

    def read_part(self, manifest: Mapping[str, Any], state: ShardedState) -> str:
        """Reads this worker's part of the shared snapshot that the chief has chosen. A collective call. Returns why it
        is damaged, or "": then the chief must choose another."""
        step = manifest["step"]
        snapshot = Snapshot(self.store.path(step), step, manifest)
        if self._in_store:
            if damage := self._in_store.bring(manifest, state):
                return damage
            snapshot = self._in_store.snapshot(manifest)
        state.read(snapshot.prefix)
        return ""

    def agree(self, step: int) -> bool:
        """Agrees before a snapshot is written in parts. A collective call. Returns whether there can be one."""
        refusal = self._last_refusal = self._in_store.agree(step) if self._in_store else ""
        if refusal:
            self._refused.append(f"SNAPSHOT NOT WRITTEN, step {step}: {refusal}. The next save tries again.")
        return not refusal

    def share(self, runtime: Runtime, patience: float) -> None:
        """Switches to snapshots in parts, if every worker sees what the chief writes. A collective call.

        patience: seconds that the chief waits for the parts of the others; 0: no limit.
        """
        directory = Path(self.store.directory)
        token = runtime.broadcast_object(uuid.uuid4().hex[:8])
        mark = directory / f".seen-by-all-{token}"
        if self._writes:
            directory.mkdir(parents=True, exist_ok=True)
            mark.touch()
        runtime.barrier()
        seen_by_all = every_worker(runtime, mark.exists())
        if self._writes:
            mark.unlink(missing_ok=True)
        if seen_by_all:
            self.store = self._parted = ShardedSnapshotFolder(
                self.store.directory,
                self.store.before_commit,
                runtime.rank,
                runtime.size,
                token,
                patience or math.inf,
                self.store.options,
            )
            self.writer = self._make_writer(attempts=1)  # a worker that retried alone would wait for the others in vain
        elif self._stored:
            in_store = self._in_store = RemoteShards(runtime, self._stored, self.store.before_commit, self._sent)
            self.writer = SnapshotWriter(in_store.writes, None, asynchronous=self._config.async_save, attempts=1)

    def _make_writer(self, attempts: int) -> SnapshotWriter:
        retention = self._retention() if self._writes else None
        return SnapshotWriter(self.store, retention, asynchronous=self._config.async_save, attempts=attempts)

    def _retention(self) -> Retention:
        config = self._config
        return Retention(config.keep, config.keep_every, config.keep_best, self._scheduled)

    def stores(self) -> list[SnapshotFolder]:
        return [self.store, *([self.backup.store] if self.backup else [])]

    def messages(self) -> Iterator[tuple[str, dict]]:
        """The writers' messages: ("save", "backup" or "warning", values)."""
        if self._writes and self.writer:
            yield from self.writer.messages()
        refused, self._refused = self._refused, []
        for each in (self._stored, self._stored_backup):
            refused += each.messages() if each else ()
        for message in refused:
            yield "warning", {"message": message}
        if self.backup:
            for kind, values in self.backup.writer.messages():
                quiet = {name: value for name, value in values.items() if name != "message"}  # there would be many
                yield ("backup", quiet) if kind == "save" else (kind, values)

    def finish(self) -> str:
        """Waits for the last write. Returns why the last snapshot could not be written, or ""."""
        if self.writer is None:
            return ""
        self.writer.wait()
        return self._last_refusal or self.writer.last_failure

    def give_up(self) -> None:
        """After an error, allows some time for current writes to be committed."""
        if self._parted:
            self._parted.give_up_at = time.monotonic() + _LAST_PART_SECONDS
        for writer in filter(None, (self.writer, self.backup and self.backup.writer)):
            with contextlib.suppress(Exception):
                writer.wait(_LAST_WRITE_SECONDS)
        if self._stored_backup:
            self._stored_backup.send_rest(_LAST_WRITE_SECONDS)

    def end_backup(self, finished: bool) -> None:
        """Ends the backup after training. finished: nothing will resume from the backup."""
        if self.backup and finished:
            self.backup.delete()
        if self._stored_backup:
            self._stored_backup.end_with(deletion=finished and self._config.delete_backup)

    def close(self) -> None:
        """Ends all sending, and gives back the lease of the backup. A store may take some time for this."""
        if self._stored_backup:
            self._stored_backup.close()
        if self._backup_lease:
            self._backup_lease.give_back()
