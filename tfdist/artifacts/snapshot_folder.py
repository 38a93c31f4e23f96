"""Commits snapshots to a folder, and decides later which of them can be trusted.

A snapshot is a folder, step-00000100, with TensorFlow's checkpoint files (state-100.index, ...) and manifest.json,
which lists every file with its size and checksum. It is written under a temporary name, flushed to the disk, and
renamed. So a folder with the final name was complete once; if it was damaged later, the manifest shows that. Without a
valid manifest nothing is trusted.

A run in an object store sends its snapshots from such a folder (remote_snapshots.py).

The calls of a save: loop._save -> SessionHooks.save -> Recovery.save -> SnapshotWriter.save; in its thread _write ->
_try -> SnapshotFolder.write -> checkpoint_files.write (for parts: ShardedSnapshotFolder.write or ShardUpload.write ->
save_part -> checkpoint_files.write_files).
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.artifacts import checkpoint_files
from tfdist.artifacts.checkpoint_arrays import ONLY_AS_SAVED, read_boxes
from tfdist.artifacts.checkpoint_files import SUFFIX
from tfdist.artifacts.file_entry import checksum_of, measure
from tfdist.artifacts.manifest import CRC, FORMAT, MANIFEST, parse, sealed
from tfdist.artifacts.policy import ALL_STEPS, ScheduledSteps
from tfdist.control.exit_codes import CheckpointError
from tfdist.control.own_files import flush_to_disk, remove_tree
from tfdist.control.user_errors import first_line

_NAME = re.compile(r"^step-([0-9]{8}|[1-9][0-9]{8,18})$")  # up to the largest value of a counter variable
_TEMPORARY = (".writing-", ".deleting-")
_REPLACED = re.compile(r"^\.replaced-(step-[0-9]+)-[0-9a-f]+$")


@dataclass(frozen=True)
class Snapshot:
    """A snapshot whose manifest and files have been found valid."""

    path: str
    step: int
    manifest: Mapping[str, Any]

    @property
    def prefix(self) -> str:
        """The prefix of TensorFlow's checkpoint files."""
        return f"{self.path}/state-{self.step}"


@dataclass(frozen=True)
class FolderOptions:
    """The differences between folders of snapshots.

    place: its name in messages; "": the folder's path. flag: the flag that chooses another place. private: whether the
    folder, if it is made here, is for this user alone. required: manifest entries without which a snapshot is useless
    here. checksum: of the files that are written here; SHA if they leave the machine.
    """

    place: str = ""
    flag: str = "--run_dir"
    private: bool = False
    required: Sequence[str] = ()
    checksum: str = CRC


OF_A_RUN = FolderOptions()


class SnapshotFolder:
    """The snapshots of one folder.

    before_commit: called with the step when all files are written but nothing is committed yet; for injected faults.
    """

    def __init__(
        self,
        directory: str,
        before_commit: Callable[[int], None] = lambda step: None,
        options: FolderOptions = OF_A_RUN,
    ):
        self.directory, self.before_commit, self.options = str(directory).rstrip("/"), before_commit, options
        self.place = options.place or self.directory
        self.not_pointed = ""  # why TensorFlow's file `checkpoint` names an older snapshot than the last one written
        self.damaged: list[int] = []  # steps that `newest_valid` has passed over

    def steps(self) -> list[int]:
        """The steps that have a snapshot folder, valid or not, oldest first."""
        if not tf.io.gfile.isdir(self.directory):
            return []
        names = (name.rstrip("/") for name in tf.io.gfile.listdir(self.directory))
        return sorted(int(match.group(1)) for match in map(_NAME.match, names) if match)

    def path(self, step: int) -> str:
        return f"{self.directory}/step-{step:08d}"

    def clean(self) -> None:
        """Removes leftovers of killed writers, and restores a snapshot that one was about to replace. Call only while
        no other process writes here."""
        if not tf.io.gfile.isdir(self.directory):
            return
        for name in (each.rstrip("/") for each in tf.io.gfile.listdir(self.directory)):
            path, replaced = f"{self.directory}/{name}", _REPLACED.match(name)
            if replaced and not os.path.exists(final := f"{self.directory}/{replaced.group(1)}"):
                os.rename(path, final)
            elif replaced or name.startswith(_TEMPORARY):
                self._remove(path)

    def _remove(self, path: str) -> None:
        """Removes a file, or a folder with its content."""
        if os.path.isdir(path):
            remove_tree(path)
        else:
            os.unlink(path)

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self, step: int, arrays: Mapping[str, np.ndarray], fields: Mapping[str, Any]) -> int:
        """Writes and commits a snapshot; replaces one of the same step. Returns its size in bytes.

        arrays: key -> array. fields: further entries of the manifest, JSON. Raises OSError or tf.errors.OpError.
        """
        if self.options.private and not tf.io.gfile.exists(self.directory):
            os.makedirs(self.directory, 0o700)
        tf.io.gfile.makedirs(self.directory)
        folder = f"{self.directory}/.writing-step-{step:08d}-{uuid.uuid4().hex[:8]}"
        try:
            tf.io.gfile.makedirs(folder)
            written = checkpoint_files.write(folder, step, arrays, self.direct)
            self.before_commit(step)
            files = self._measured(folder, written, sorted(os.listdir(folder)))
            self._seal(folder, step, files, fields)
        except BaseException:
            if os.path.exists(folder):
                remove_tree(folder)
            raise
        self._point_to(step)
        return sum(entry["bytes"] for entry in files.values())

    @property
    def direct(self) -> bool:
        """Whether data files bypass the page cache: nothing reads them again soon, except to send them."""
        return self.options.checksum == CRC

    def _measured(
        self, folder: str, written: Mapping[str, dict[str, Any]], names: Iterable[str]
    ) -> dict[str, dict[str, Any]]:
        """The manifest's entries of files, all of which are on the disk then. written: known entries of some files."""
        known, checksum = written if self.direct else {}, self.options.checksum
        return {name: known.get(name) or measure(f"{folder}/{name}", checksum, flush=True) for name in names}

    def _seal(self, folder: str, step: int, files: Mapping[str, Mapping[str, Any]], fields: Mapping[str, Any]) -> None:
        """Commits the files written in `folder`; they are listed with their sizes and checksums."""
        final, manifest = self.path(step), {"format": FORMAT, "step": step, **fields, "files": files}
        self._write_text(f"{folder}/{MANIFEST}", sealed(manifest))
        flush_to_disk(folder)
        aside = f"{self.directory}/.replaced-step-{step:08d}-{uuid.uuid4().hex[:8]}"
        if is_anew := os.path.exists(final):
            os.rename(final, aside)  # removal is slow: a process killed meanwhile must leave one of them
        os.rename(folder, final)
        flush_to_disk(self.directory)
        if is_anew:
            with contextlib.suppress(OSError):  # the new one counts anyway, and `clean` removes the old one later
                remove_tree(aside)

    def _write_text(self, path: str, text: str) -> None:
        with tf.io.gfile.GFile(path, "w") as file:
            file.write(text)
        flush_to_disk(path)

    def _point_to(self, step: int) -> None:
        """Updates TensorFlow's `checkpoint` file, so that tf.train.latest_checkpoint(directory) finds the newest one.
        That is committed already, and nothing here needs the file: if it cannot be written, `not_pointed` says why.
        """
        text = checkpoint_files.pointer(f"step-{step:08d}/state-{step}")
        temporary = f"{self.directory}/.writing-checkpoint-{uuid.uuid4().hex[:8]}"
        self.not_pointed = ""
        try:
            self._write_text(temporary, text)
            tf.io.gfile.rename(temporary, f"{self.directory}/checkpoint", overwrite=True)
        except (OSError, tf.errors.OpError) as error:
            self.not_pointed = f"{type(error).__name__}: {first_line(error)}"
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def delete(self, step: int) -> None:
        """Deletes a snapshot. If killed midway, it leaves nothing that looks complete."""
        path, doomed = self.path(step), f"{self.directory}/.deleting-step-{step:08d}-{uuid.uuid4().hex[:8]}"
        os.rename(path, doomed)
        remove_tree(doomed)

    def delete_all(self) -> None:
        """Deletes all snapshots and leftovers of killed writers. Call only while no other process writes here."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.directory}/checkpoint")
        for step in self.steps():
            self.delete(step)
        self.clean()

    # -- trusting --------------------------------------------------------------------------------------------------

    def verify(self, step: int) -> Snapshot:
        """Checks a snapshot file by file. Raises CheckpointError naming the file that is damaged."""
        path = self.path(step)
        if os.path.exists(f"{path}/{MANIFEST}") and not os.path.isfile(f"{path}/{MANIFEST}"):
            raise CheckpointError(f"{path}/{MANIFEST} is not a file.")  # a pipe would be waited for
        try:
            with tf.io.gfile.GFile(f"{path}/{MANIFEST}") as file:
                manifest = parse(file.read(), f"{path}/{MANIFEST}", step, self.options.required)
        except tf.errors.NotFoundError:
            raise CheckpointError(f"{path}/{MANIFEST} is missing: the snapshot was never completed.") from None
        except (tf.errors.OpError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}/{MANIFEST} is damaged ({type(error).__name__}).") from None
        for name, entry in manifest["files"].items():
            self._check_file(f"{path}/{name}", entry)
        snapshot = Snapshot(path, step, manifest)
        try:
            self.table(snapshot)
        except (tf.errors.OpError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path} contains no TensorFlow checkpoint ({type(error).__name__}).") from None
        return snapshot

    def _check_file(self, file: str, entry: Mapping[str, Any]) -> None:
        """Compares a file with its entry in the manifest. Raises CheckpointError."""
        try:
            if not tf.io.gfile.exists(file):
                raise CheckpointError(f"{file} is missing.")
            if os.path.realpath(file) != f"{os.path.realpath(os.path.dirname(file))}/{os.path.basename(file)}":
                raise CheckpointError(f"{file} is a link to another place: a snapshot's files are in its own folder.")
            found = measure(file, checksum_of(entry), flush=False)
        except (OSError, tf.errors.OpError) as error:
            raise CheckpointError(f"{file} cannot be read ({type(error).__name__}).") from None
        if found["bytes"] != entry["bytes"]:
            raise CheckpointError(f"{file} has {found['bytes']} bytes instead of {entry['bytes']}.")
        if not found.items() <= entry.items():
            raise CheckpointError(f"{file} is damaged: its checksum does not match the manifest.")

    def newest_valid(self, scheduled: ScheduledSteps = ALL_STEPS) -> tuple[Snapshot | None, list[str]]:
        """The newest complete snapshot of the `scheduled` steps, and why newer ones were passed over."""
        passed_over, self.damaged = [], []
        for step in filter(scheduled, reversed(self.steps())):
            try:
                return self.verify(step), passed_over
            except CheckpointError as error:
                passed_over.append(str(error))
                self.damaged.append(step)
        return None, passed_over

    def set_aside_damaged(self) -> None:
        """Renames the snapshots that `newest_valid` has passed over: they must not count as kept ones while a valid one
        is deleted."""
        for step in self.damaged:
            self.set_aside(step, "damaged")
        self.damaged = []

    def set_aside(self, step: int, why: str) -> None:
        """Renames a snapshot so that it no longer belongs to the run."""
        os.rename(self.path(step), f"{self.directory}/{why}-step-{step:08d}-{uuid.uuid4().hex[:8]}")

    def read(self, snapshot: Snapshot) -> dict[str, np.ndarray]:
        """Reads all arrays: key -> array."""
        reader = tf.train.load_checkpoint(snapshot.prefix)

        def read(key: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
            if dtype not in ONLY_AS_SAVED:
                # A single string comes as bytes.
                return np.asarray(reader.get_tensor(key + SUFFIX), tf.as_dtype(dtype).as_numpy_dtype)
            whole = tuple((0, size) for size in shape)
            return read_boxes(snapshot.prefix, key + SUFFIX, shape, [whole], tf.as_dtype(dtype))[0]

        return {key: read(key, shape, dtype) for key, (shape, dtype) in self.table(snapshot).items()}

    def table(self, snapshot: Snapshot) -> dict[str, tuple[tuple[int, ...], str]]:
        """key -> (shape, dtype), from the checkpoint itself."""
        reader = tf.train.load_checkpoint(snapshot.prefix)
        types = reader.get_variable_to_dtype_map()
        return {
            name.removesuffix(SUFFIX): (tuple(shape), types[name].name)
            for name, shape in reader.get_variable_to_shape_map().items()
            if name.endswith(SUFFIX) and not name.startswith("save_counter")
        }


def must_be_of(step: int, steps: Sequence[int], place: str) -> None:
    """Raises CheckpointError unless there is a snapshot of the step that --at_step asks for."""
    if step not in steps:
        raise CheckpointError(
            f"--at_step={step}: {place} has no snapshot of that step; it has {', '.join(map(str, steps)) or 'none'}."
        )
