"""Where a run's snapshots and backups lie, and who writes them.

Only the chief touches the files, unless the state is divided over a mesh and all workers see the same folder: then
everyone writes and reads its own part (artifacts/parts.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tfdist.artifacts import restore
from tfdist.artifacts.backup import BackupAndRestore
from tfdist.artifacts.manifest import SHA
from tfdist.artifacts.parts import PartedStore
from tfdist.artifacts.policy import Retention
from tfdist.artifacts.store import Snapshot, SnapshotStore
from tfdist.artifacts.writer import SnapshotWriter
from tfdist.config import CheckpointConfig, Config
from tfdist.control.exit_codes import ConfigError
from tfdist.control.faults import Faults
from tfdist.run.agreement import broadcast_json
from tfdist.run.stored_run import StoredRun
from tfdist.runtime.base import Runtime
from tfdist.storage.store_errors import as_sentence

_LAST_WRITE_SECONDS = 10.0  # after an error: a snapshot that is being written is worth this wait
_LAST_PART_SECONDS = 2.0  # and for the part of a worker that may be gone, this


class SnapshotFiles:
    """One worker's view of them.

    in_parts: whether this worker writes and reads a part of each snapshot.
    writer: None where another worker writes all. backup: None without --backup_dir.
    """

    def __init__(
        self, folder: Path, config: CheckpointConfig, faults: Faults, writes: bool, stored: StoredRun | None = None
    ):
        self.store = SnapshotStore(str(folder / "checkpoints"), lambda step: faults.at("save", step))
        self._config, self._writes = config, writes  # writes: whether this is the chief
        self._parted: PartedStore | None = None
        self.writer = self._make_writer(attempts=2) if writes else None
        self.backup: BackupAndRestore | None = None
        if config.backup_dir:
            if writes:
                _make_backup_folder(config.backup_dir)
            self.backup = BackupAndRestore(
                config.backup_dir,
                config.backup_every or "epoch",
                config.double_backup,
                config.delete_backup,
                writes=writes,
            )
        self._stored = stored
        for store in self.stores():
            self._prepare(store)
        self._sent = stored.sends(self.store, self._retention()) if stored and writes else None
        self._sends = False  # the thread that sends has begun

    def choose(self, config: Config) -> tuple[Snapshot | None, list[str]]:
        """What restore.choose does, on the chief; of what lies here, and in the run's object store if it has one.
        Raises CheckpointError, and what a store does not do.
        """
        self.store.clean()
        # Later, after bad numbers, all that this run has written is here, and a store that is away must end nothing.
        brought = [] if self._sends else self._bring_newest()
        snapshot, messages = restore.choose(self.store, config, self.backup and self.backup.store)
        if snapshot:
            for store in self.stores():
                store.set_aside_damaged()
        return snapshot, brought + messages

    def _bring_newest(self) -> list[str]:
        """From an object store; from now on what is written here is sent there. Returns messages."""
        if self._sent is None:
            return []
        with as_sentence():
            messages = self._sent.bring_newest()
            self._sent.start()
        self._sends = True
        return messages

    @property
    def in_parts(self) -> bool:
        return self._parted is not None

    def share(self, runtime: Runtime, patience: float) -> None:
        """Write in parts, if every worker sees what the chief writes. A collective.

        patience: seconds that the chief waits for the parts of the others; 0: any time.
        """
        directory = Path(self.store.directory)
        token = broadcast_json(runtime, {"token": uuid.uuid4().hex[:8]})["token"]
        mark = directory / f".seen-by-all-{token}"
        if self._writes:
            directory.mkdir(parents=True, exist_ok=True)
            mark.touch()
        runtime.barrier()
        seen_by_all = runtime.all_gather(np.array([mark.exists()], np.int32)).all()
        if self._writes:
            mark.unlink(missing_ok=True)
        if seen_by_all:
            before_commit = self.store.before_commit
            self.store = self._parted = PartedStore(
                self.store.directory, before_commit, runtime.rank, runtime.size, token, patience or math.inf
            )
            self._prepare(self.store)
            self.writer = self._make_writer(attempts=1)  # whoever tries again alone waits for the others in vain

    def _prepare(self, store: SnapshotStore) -> None:
        store.required = restore.REQUIRED
        if self._stored:
            store.checksum = SHA

    def _make_writer(self, attempts: int) -> SnapshotWriter:
        retention = self._retention() if self._writes else None
        return SnapshotWriter(self.store, retention, asynchronous=self._config.async_save, attempts=attempts)

    def _retention(self) -> Retention:
        return Retention(self._config.keep, self._config.keep_every, self._config.keep_best)

    def stores(self) -> list[SnapshotStore]:
        return [self.store, *([self.backup.store] if self.backup else [])]

    def messages(self) -> Iterator[tuple[str, dict]]:
        """What the writers have to say: ("save", "backup" or "warning", values)."""
        if self._writes and self.writer:
            yield from self.writer.messages()
        if self._stored:
            yield from (("warning", {"message": message}) for message in self._stored.messages())
        if self.backup:
            for kind, values in self.backup.writer.messages():
                quiet = {name: value for name, value in values.items() if name != "message"}  # there are many
                yield ("backup", quiet) if kind == "save" else (kind, values)

    def finish(self) -> str:
        """Waits for the last write. Returns why the last snapshot could not be written, or ""."""
        if self.writer is None:
            return ""
        self.writer.wait()
        return self.writer.last_failure

    def give_up(self) -> None:
        """After an error: what is being written gets the time to be committed."""
        if self._parted:
            self._parted.give_up_at = time.monotonic() + _LAST_PART_SECONDS
        for writer in filter(None, (self.writer, self.backup and self.backup.writer)):
            with contextlib.suppress(Exception):
                writer.wait(_LAST_WRITE_SECONDS)

    def delete_backup(self) -> None:
        """The run has finished: nothing will go on from it."""
        if self.backup:
            self.backup.delete()


def _make_backup_folder(name: str) -> None:
    """Raises ConfigError if it cannot be made or written: each backup would fail, and nobody have noticed at the
    start.
    """
    try:
        os.makedirs(name, 0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=name):
            pass
    except OSError as error:
        raise ConfigError(
            f"--backup_dir={name} cannot be used ({error.strerror}): name a folder that can be written."
        ) from None
