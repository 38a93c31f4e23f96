"""Snapshots of which every worker writes a part, and reads a part: no worker ever holds all of it.

The files are those of any other snapshot (snapshot_folder.py): whole arrays by key, with one manifest. This works
because TensorFlow's checkpoints support *slices*: a worker saves boxes of an array, the chief merges the tables of
contents when all parts are there, and a reader asks for other boxes, or for whole arrays.

    every worker     part-00002.data-..., part-00002.index, and then part-00002.json with their sizes and checksums
    the chief        waits for all part-*.json, merges, writes the manifest, renames the folder: the commit

All workers must see the same folder. A box is ((start, length) for each dim).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.artifacts import checkpoint_files
from tfdist.artifacts.checkpoint_arrays import read_boxes
from tfdist.artifacts.checkpoint_files import SUFFIX, Entry
from tfdist.artifacts.file_entry import measure
from tfdist.artifacts.snapshot_folder import OF_A_RUN, FolderOptions, SnapshotFolder
from tfdist.compat.checkpoint_index import Box, is_whole
from tfdist.control.user_errors import first_line

_POLL_SECONDS = 0.02


class Shard(NamedTuple):
    """A box of a whole array of `shape`. array: its content."""

    key: str
    shape: tuple[int, ...]
    box: Box
    array: np.ndarray | None = None

    @property
    def entry(self) -> Entry:
        """The box as an entry of a checkpoint file."""
        assert self.array is not None
        box = None if is_whole(self.box, self.shape) else self.box
        return Entry(self.key + SUFFIX, self.array, self.shape, box)


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Elements [start, stop) of a flattened array of `shape`, as boxes in the same order. At most 2 x dims - 1."""
    if start >= stop:
        return []
    if len(shape) < 2:
        return [((start, stop - start),) if shape else ()]
    row = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        return [((first, 1), *box) for box in boxes_of_range(shape[1:], head, tail)]
    boxes = [((first, 1), *box) for box in boxes_of_range(shape[1:], head, row)] if head else []
    first += bool(head)
    if last > first:
        boxes.append(((first, last - first), *((0, size) for size in shape[1:])))
    return boxes + [((last, 1), *box) for box in boxes_of_range(shape[1:], 0, tail)]


def runs(places: np.ndarray) -> list[tuple[int, int]]:
    """Divides increasing places into runs (start, length) of consecutive ones."""
    cuts = np.flatnonzero(np.diff(places) != 1) + 1
    return [(int(run[0]), len(run)) for run in np.split(places, cuts) if len(run)]


def read_shards(prefix: str, shards: Sequence[Shard], dtype: Any) -> list[np.ndarray]:
    """Reads boxes of one array of the checkpoint `prefix`. Raises tf.errors.OpError, ValueError."""
    if not shards:
        return []
    first = shards[0]
    return read_boxes(prefix, first.key + SUFFIX, first.shape, [shard.box for shard in shards], tf.as_dtype(dtype))


def save_part(
    prefix: str, shards: Sequence[Shard], keys: Sequence[str], direct: bool, if_nothing: str = ""
) -> dict[str, dict[str, Any]]:
    """Writes a checkpoint of these boxes only; without any, none, or one with an entry called `if_nothing`. keys: of
    all arrays, if it shall describe the whole. Returns the result of `checkpoint_files.write_files`. Raises OSError.
    """
    entries = [shard.entry for shard in shards]
    if keys:
        entries += checkpoint_files.description(keys)
    if if_nothing and not entries:
        entries.append(Entry(if_nothing, np.zeros((), np.int8)))
    return checkpoint_files.write_files(prefix, entries, direct) if entries else {}


class ShardedSnapshotFolder(SnapshotFolder):
    """A folder of snapshots that `size` workers write together; each worker has one. Call `write` on all of them.

    Args:
      token: the same on all workers, and different in each attempt of a run.
      patience: seconds that the chief waits for the parts of the others.
    """

    def __init__(
        self,
        directory: str,
        before_commit: Callable[[int], None],
        rank: int,
        size: int,
        token: str,
        patience: float,
        options: FolderOptions = OF_A_RUN,
    ):
        super().__init__(directory, before_commit, options)
        self.rank, self.size, self.token, self.patience = rank, size, token, patience
        self.give_up_at = math.inf  # time.monotonic(), after an error elsewhere
        self._writes = 0  # the same number on all workers

    def write(self, step: int, arrays: Sequence[Shard], fields: Mapping[str, Any]) -> int:
        """Writes this worker's part; the chief also commits. Returns the bytes of the part, on the chief of all parts.

        Raises OSError or tf.errors.OpError. Then there is no snapshot of this step, and the next save tries again.
        """
        # Numbered, as a step may be written again: a late part of the first write must not join the second.
        self._writes += 1
        folder = f"{self.directory}/.writing-step-{step:08d}-{self.token}-{self._writes}"
        if self.rank == 0:
            self._remove_failed(step)
        os.makedirs(folder, exist_ok=True)
        try:
            size = self._write_part(folder, step, arrays, sorted(fields["variables"]))
            return self._commit(folder, step, fields) if self.rank == 0 else size
        except Exception as error:  # whatever it is, the others must be told, or they would wait
            if self.rank == 0:
                # Others may still be writing there; their leftovers are removed before the next snapshot.
                shutil.rmtree(folder, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):  # the chief may have given up already
                    self._announce(
                        folder,
                        {"error": f"rank {self.rank}: {first_line(error) or type(error).__name__}"},
                    )
            raise

    def _remove_failed(self, step: int) -> None:
        """Removes leftovers of slower workers from earlier snapshots that the chief had given up."""
        left = re.compile(rf"\.writing-step-([0-9]+)-{self.token}-([0-9]+)")
        for name in os.listdir(self.directory) if os.path.isdir(self.directory) else ():
            found = left.fullmatch(name)
            if found and (int(found.group(1)) < step or int(found.group(2)) < self._writes):
                shutil.rmtree(f"{self.directory}/{name}", ignore_errors=True)

    def _write_part(self, folder: str, step: int, shards: Sequence[Shard], keys: Sequence[str]) -> int:
        prefix = f"{folder}/part-{self.rank:05d}"
        written = save_part(prefix, shards, keys if self.rank == 0 else (), self.direct)
        self.before_commit(step)
        files = self._measured(folder, written, written)
        self._announce(folder, {"files": files, "values": values_of(shards)})
        return sum(entry["bytes"] for entry in files.values())

    def _announce(self, folder: str, message: Mapping[str, Any]) -> None:
        path = f"{folder}/part-{self.rank:05d}.json"
        self._write_text(f"{path}.new", json.dumps(message))
        os.rename(f"{path}.new", path)

    def _commit(self, folder: str, step: int, fields: Mapping[str, Any]) -> int:
        messages = self._wait_for_parts(folder)
        must_hold_all([message["values"] for message in messages], fields)
        parts = [f"{folder}/part-{rank:05d}" for rank in range(self.size) if messages[rank]["files"]]
        prefix = f"{folder}/state-{step}"
        tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=prefix, delete_old_dirs=False)
        for rank in range(self.size):
            os.remove(f"{folder}/part-{rank:05d}.json")
        # The data files have new names but unchanged content; only the table of contents is new.
        entries = [entry for message in messages for entry in message["files"].values()]
        files = {f"state-{step}.data-{number:05d}-of-{len(entries):05d}": entry for number, entry in enumerate(entries)}
        files[f"state-{step}.index"] = measure(f"{prefix}.index", self.options.checksum, flush=True)
        if sorted(os.listdir(folder)) != sorted(files):
            raise OSError(
                f"{folder} contains {', '.join(sorted(os.listdir(folder)))} instead of {', '.join(sorted(files))}."
            )
        self._seal(folder, step, files, fields)
        self._point_to(step)
        return sum(entry["bytes"] for entry in files.values())

    def _wait_for_parts(self, folder: str) -> list[dict[str, Any]]:
        """Waits for the messages of all workers. Raises OSError if one failed, or does not arrive."""
        begun, messages = time.monotonic(), {}
        while len(messages) < self.size:
            for rank in set(range(self.size)) - set(messages):
                with (
                    contextlib.suppress(FileNotFoundError),
                    open(f"{folder}/part-{rank:05d}.json", encoding="utf-8") as file,
                ):
                    messages[rank] = json.load(file)
                    if "error" in messages[rank]:
                        raise OSError(messages[rank]["error"])
            if time.monotonic() > min(begun + self.patience, self.give_up_at):
                missing = sorted(set(range(self.size)) - set(messages))
                raise OSError(
                    f"the shards of ranks {', '.join(map(str, missing))} did not arrive in"
                    f" {time.monotonic() - begun:.0f} s"
                )
            time.sleep(_POLL_SECONDS)
        return [messages[rank] for rank in range(self.size)]


def values_of(shards: Sequence[Shard]) -> int:
    """The number of elements in all boxes."""
    return sum(math.prod(length for _, length in shard.box) for shard in shards)


def must_hold_all(values: Sequence[int], fields: Mapping[str, Any]) -> None:
    """Raises OSError if parts with these numbers of elements do not make up all of a manifest's variables."""
    expected = sum(math.prod(shape) for _, shape, _ in fields["variables"].values())
    if (written := sum(values)) != expected:
        raise OSError(f"the shards contain {written} values instead of {expected}")
