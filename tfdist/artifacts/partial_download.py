"""Brings only those bytes of a snapshot in an object store that a worker needs: the table of contents, and the bytes in
the data files where its boxes are.

They are written to local files of the same names and sizes, with holes where nothing was needed; TensorFlow reads these
like any checkpoint. There is no record of which bytes are here already: each array, and each slice of one, has a
checksum in the table of contents, and local bytes that match it are used. So parts written on this machine, and bytes
that another worker here has brought, come from the disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.artifacts.checkpoint_files import SUFFIX
from tfdist.artifacts.file_entry import has_content
from tfdist.artifacts.policy import ALL_STEPS, ScheduledSteps
from tfdist.artifacts.remote_snapshots import RemoteSnapshots
from tfdist.artifacts.shard_upload import PARTS, data_file
from tfdist.artifacts.sharded_snapshots import Shard
from tfdist.artifacts.snapshot_folder import OF_A_RUN, FolderOptions, Snapshot, SnapshotFolder
from tfdist.artifacts.stored_manifest import step_folder, whole_manifest
from tfdist.compat.checkpoint_index import CheckpointIndex, Stored, overlap
from tfdist.control.exit_codes import CheckpointError
from tfdist.control.own_files import remove_tree, replaced
from tfdist.storage.in_threads import in_threads
from tfdist.storage.object_store import ObjectStore

_GAP_BYTES = 1 << 16  # a smaller gap between two wanted pieces is brought, too
_PIECE_BYTES = 1 << 25  # bytes brought at a time


class PartialDownload(SnapshotFolder):
    """The snapshots below `objects`, and their local bytes, below a working copy."""

    def __init__(
        self,
        objects: ObjectStore,
        folder: Path,
        remote: RemoteSnapshots | None,
        options: FolderOptions = OF_A_RUN,
    ):
        super().__init__(str(folder / PARTS), options=options)
        self.objects, self._remote = objects, remote

    def newest_valid(self, scheduled: ScheduledSteps = ALL_STEPS) -> tuple[Snapshot | None, list[str]]:
        """The newest snapshot in the store, among the `scheduled` steps, that is valid by its table of contents. On the
        chief. Raises StoreError.
        """
        assert self._remote
        messages, damaged = list[str](), self._remote.damaged_there
        for step in filter(scheduled, reversed(self._remote.steps())):
            if step not in damaged:
                try:
                    return self._found(step), messages
                except CheckpointError as error:
                    damaged[step] = str(error)
            messages.append(f"{self.objects.url}: {damaged[step]}")
        return None, messages

    def set_aside_damaged(self) -> None:
        """Renames the manifests of damaged snapshots in the store. On the chief. Raises StoreError."""
        assert self._remote
        for step in list(self._remote.damaged_there):
            self._remote.set_aside(step)

    def _found(self, step: int) -> Snapshot:
        """Checks a snapshot in the store and brings its table of contents. Raises CheckpointError, StoreError."""
        listed = self.objects.names(step_folder(step))
        _, manifest = whole_manifest(self.objects, step, self.options.required, listed)
        snapshot = Snapshot(self.path(step), step, manifest)
        self._bring_index(snapshot)
        return snapshot

    def bring(self, snapshot: Snapshot, shards: Sequence[Shard]) -> None:
        """Brings the bytes of these boxes only. Raises CheckpointError if they are damaged, StoreError, OSError."""
        index = self._bring_index(snapshot)
        wanted: dict[int, set[Stored]] = {}
        for shard in shards:
            try:
                found = [each for each in index.stored(shard.key + SUFFIX) if overlap(shard.box, each.box)]
            except (KeyError, ValueError) as error:
                lacks = f"lacks {error}" if isinstance(error, KeyError) else f"is damaged ({error})"
                raise CheckpointError(f"{step_folder(snapshot.step)}/state-{snapshot.step}.index {lacks}.") from None
            for each in found:
                if each.size:
                    wanted.setdefault(each.file, set()).add(each)
        for note in Path(snapshot.path).glob("part-*.json"):
            note.unlink(missing_ok=True)  # this part must not be sent any more, and its files may soon change
        files: Mapping[str, Any] = snapshot.manifest["files"]
        missing = []
        for number, stored in wanted.items():
            name = data_file(snapshot.step, number, index.files)
            if name not in files:
                raise CheckpointError(f"{snapshot.path}: the manifest does not name {name}.")
            file = Path(snapshot.path) / name
            _make_room(file, files[name]["bytes"])
            absent = [each for each in stored if not each.is_intact(_content(file, each))]
            missing += [(name, start, size) for start, size in _ranges(absent)]
        in_threads(lambda name, start, size: self._bring_piece(snapshot, name, start, size), missing)
        for number, stored in wanted.items():
            name = data_file(snapshot.step, number, index.files)
            for each in stored:
                if not each.is_intact(_content(Path(snapshot.path) / name, each)):
                    raise CheckpointError(
                        f"{step_folder(snapshot.step)}/{name} is damaged: the checksum of bytes {each.offset} to"
                        f" {each.offset + each.size} does not match the table of contents."
                    )

    def _bring_piece(self, snapshot: Snapshot, name: str, start: int, size: int) -> None:
        try:
            content = self.objects.piece(f"{step_folder(snapshot.step)}/{name}", start, size)
        except FileNotFoundError:
            raise CheckpointError(f"{step_folder(snapshot.step)}/{name} is missing.") from None
        with open(os.open(Path(snapshot.path) / name, os.O_WRONLY | os.O_NOFOLLOW), "wb") as file:
            file.seek(start)
            file.write(content)  # all of it: os.pwrite writes what there is room for, and raises nothing

    def _bring_index(self, snapshot: Snapshot) -> CheckpointIndex:
        """Brings the table of contents, if it is not here. Raises CheckpointError, StoreError, OSError."""
        name = f"state-{snapshot.step}.index"
        entry, file = snapshot.manifest["files"][name], Path(snapshot.path) / name
        if not has_content(str(file), entry):
            file.parent.mkdir(parents=True, exist_ok=True)
            with replaced(file) as temporary:
                try:
                    temporary.write_bytes(self.objects.piece(f"{step_folder(snapshot.step)}/{name}", 0, entry["bytes"]))
                except FileNotFoundError:
                    raise CheckpointError(f"{step_folder(snapshot.step)}/{name} is missing.") from None
        if not has_content(str(file), entry):
            raise CheckpointError(f"{step_folder(snapshot.step)}/{name} is damaged: its checksum does not match.")
        try:
            return CheckpointIndex(file.read_bytes())
        except ValueError as error:
            raise CheckpointError(f"{step_folder(snapshot.step)}/{name}: {error}.") from None

    def forget_all_but(self, steps: Iterable[int]) -> None:
        """Removes all other steps here. Call only while nobody reads or writes here. Raises OSError."""
        for step in set(self.steps()) - set(steps):
            remove_tree(self.path(step))


def _ranges(absent: Sequence[Stored]) -> Iterator[tuple[int, int]]:
    """(start, size) of the reads that cover all of `absent`."""
    start = end = 0
    for each in sorted(absent, key=lambda each: each.offset):
        if each.offset > end + _GAP_BYTES:
            yield from _in_pieces(start, end)
            start = each.offset
        end = max(end, each.offset + each.size)
    yield from _in_pieces(start, end)


def _in_pieces(start: int, end: int) -> Iterator[tuple[int, int]]:
    for place in range(start, end, _PIECE_BYTES):
        yield place, min(_PIECE_BYTES, end - place)


def _make_room(file: Path, size: int) -> None:
    """Sets a file to this size, keeping its content. Several workers may do so at the same time. Raises OSError."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        if os.fstat(descriptor).st_size != size:
            os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)


def _content(file: Path, stored: Stored) -> Iterator[bytes]:
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        for start, size in _in_pieces(stored.offset, stored.offset + stored.size):
            yield os.pread(descriptor, size, start)
    finally:
        os.close(descriptor)
