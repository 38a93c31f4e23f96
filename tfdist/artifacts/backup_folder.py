"""A folder of backups: the newest one, or the newest two, in the format of a snapshot.

`BackupAndRestore` (backup.py) writes the state of a Keras loop there; `--backup_dir` (run/snapshot_files.py) writes
that of tfdist.train.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.artifacts.manifest import CRC
from tfdist.artifacts.policy import Retention
from tfdist.artifacts.snapshot_folder import FolderOptions, Snapshot, SnapshotFolder
from tfdist.artifacts.writer import SnapshotWriter
from tfdist.control.exit_codes import CheckpointError, ConfigError
from tfdist.control.own_files import check_owner
from tfdist.control.terminal import say


class BackupFolder:
    """The backups in a folder, of which at most one process `writes`.

    two: also keep the backup before the last one. delete_at_end: whether `delete` deletes anything. required, checksum:
    see FolderOptions.
    """

    def __init__(
        self,
        folder: str,
        *,
        two: bool,
        delete_at_end: bool,
        writes: bool,
        required: Sequence[str],
        checksum: str = CRC,
    ):
        # private, since every user can write to /dev/shm
        options = FolderOptions(flag="--backup_dir", private=True, required=required, checksum=checksum)
        self.store = SnapshotFolder(folder, options=options)
        self.retention = Retention(2 if two else 1)
        self.writer = SnapshotWriter(self.store, self.retention)
        self._writes, self._delete_at_end = writes, delete_at_end

    def begin(self) -> None:
        """Call first, while no other process writes there: removes what killed processes have left. Raises ConfigError
        if the folder cannot be used, before anything is changed in it."""
        if not self._writes or not os.path.isdir(self.store.directory):
            return
        try:
            check_owner(self.store.directory)
        except OSError as error:
            raise ConfigError(
                f"The folder {self.store.directory} cannot be used ({error.strerror}): name a folder of your own"
                " that can be written."
            ) from None
        self.store.clean()

    def newest(self, others: Sequence[BackupFolder] = ()) -> Snapshot | None:
        """Returns the newest valid backup. Those that are damaged are told and set aside: else they would count as the
        newest, and later ones would be removed. Raises CheckpointError if only damaged ones are there, and no valid one
        in any of the `others`, from which the same fit can be resumed."""
        found, damaged = self.store.newest_valid()
        if damaged and found is None:
            in_others = [each.store.newest_valid() for each in others]
            if not any(valid for valid, _ in in_others):
                folders = " and ".join(each.store.directory for each in (self, *others) if each.store.steps())
                reasons = "; ".join([*damaged, *(reason for _, reasons in in_others for reason in reasons)])
                raise CheckpointError(
                    f"No backup in {folders} is valid ({reasons}): remove {folders} to start from the beginning, or"
                    " name another folder."
                )
        for reason in damaged:
            say(f"skipped a backup: {reason}")
        if self._writes:
            self.store.set_aside_damaged()
        return found

    def back_up(self, step: int, arrays: Mapping[str, np.ndarray], fields: Mapping[str, Any]) -> None:
        """Writes arrays, which must not change any more, in the background."""
        if self._writes:
            self.writer.save(step, arrays, fields)

    def delete(self) -> None:
        """Deletes every backup, if that was requested. Called when training has finished."""
        self.writer.wait()
        if self._delete_at_end and self._writes:
            self.store.delete_all()
