"""Snapshots in an object store for which every worker writes and sends its own part: no machine has all of a snapshot.

Workers without a shared folder cannot write parts there together (sharded_snapshots.py). Each writes its own part below
parts/ in its working copy, which workers of a machine share, and sends it in a thread. The parts come together in the
store:

    every worker     state-100.data-00002-of-00008, part-00002.index, and then part-00002.json: what it has sent
    the chief        waits for all part-*.json there and writes state-100.index and then manifest.json: the commit
                     (sharded_commit.py)

So in the end it is like any other snapshot. Each write of a part has its own stamp, the same on all workers, so that
parts of two writes never become one snapshot. At every save the workers agree on what the chief still wants: the
snapshot that is being gathered, and the newest.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.artifacts.file_entry import measure
from tfdist.artifacts.manifest import SHA
from tfdist.artifacts.sharded_snapshots import Shard, save_part, values_of
from tfdist.artifacts.snapshot_folder import SnapshotFolder
from tfdist.artifacts.stored_manifest import step_folder
from tfdist.artifacts.upload_thread import UploadThread
from tfdist.control.own_files import remove_tree, written_whole
from tfdist.control.user_errors import first_line
from tfdist.storage.object_store import ObjectStore

PARTS = "parts"  # the folder in the working copy
_LONGEST_NOTE = 1 << 26  # limit in bytes for reading a part's JSON
_MOST_WORKERS = 1 << 16


def data_file(step: int, number: int, count: int) -> str:
    """The name of a data file, as in TensorFlow's checkpoints."""
    return f"state-{step}.data-{number:05d}-of-{count:05d}"


def note_of(rank: int) -> str:
    """The object that lists what a worker has sent."""
    return f"part-{rank:05d}.json"


def index_of(rank: int) -> str:
    """The table of contents of a worker's part."""
    return f"part-{rank:05d}.index"


class ShardUpload(SnapshotFolder):
    """The parts of one of `size` workers, in a local folder and below `objects`. `write` must be called on all workers.

    Args:
      token: the same on all workers, and different in each attempt of a run.
      allowed: called in a thread before anything is written in the store; may raise StoreError.
    """

    def __init__(
        self,
        objects: ObjectStore,
        folder: Path,
        before_commit: Callable[[int], None],
        rank: int,
        size: int,
        token: str,
        allowed: Callable[[], None],
    ):
        super().__init__(str(folder / PARTS), before_commit)
        self.objects, self.rank, self.size, self.token, self._allowed = objects, rank, size, token, allowed
        self.wanted: list[int] = []  # steps whose parts are to be sent, or kept; the most urgent first
        self.sent: set[int] = set()
        self._notes: dict[int, dict[str, Any]] = {}  # step -> the message about this worker's part
        self._writes = 0
        self.sender = UploadThread(self.unsent, self._send_next)

    def unsent(self) -> list[int]:
        """Steps of which this worker's part is here, but not in the store; oldest first."""
        return sorted(step for step in list(self._notes) if step not in self.sent)

    def stamp(self, step: int) -> str:
        """The stamp of the last write of a step; "" if there was none."""
        return self._notes.get(step, {}).get("stamp", "")

    def write(self, step: int, arrays: Sequence[Shard], fields: Mapping[str, Any]) -> int:
        """Writes this worker's part here. Returns its size in bytes. Raises OSError or tf.errors.OpError: then there
        will be no snapshot of this step."""
        self.forget_all_but([*self.wanted, step])
        about = {"stamp": f"{self.token}-{self._writes}", "run_id": fields["run_id"], "workers": self.size}
        self._writes += 1
        note = {**about, "error": f"rank {self.rank}: it was not written"}
        try:
            written = self._write_part(step, arrays, sorted(fields["variables"]))
            whole = {**about, **written, "values": values_of(arrays), **({} if self.rank else {"fields": dict(fields)})}
            with written_whole(Path(self.path(step)) / note_of(self.rank), flushed=True) as file:
                json.dump(whole, file)
            note = whole
            return written["data"]["bytes"]
        except Exception as error:  # whatever it is, the others must be told
            note["error"] = f"rank {self.rank}: {first_line(error) or type(error).__name__}"
            raise
        finally:
            self._announce(step, note)

    def _announce(self, step: int, note: dict[str, Any]) -> None:
        self._notes[step] = note
        self.sent.discard(step)
        if step not in self.wanted:
            self.wanted = [*self.wanted, step]

    def _write_part(self, step: int, shards: Sequence[Shard], keys: Sequence[str]) -> dict[str, Any]:
        folder = Path(self.path(step))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / note_of(self.rank)).unlink(missing_ok=True)
        prefix = f"{folder}/.writing-part-{self.rank:05d}"
        # Every worker writes a data file, so that each knows the name of its own.
        save_part(prefix, shards, keys if self.rank == 0 else (), direct=False, if_nothing=f"_PART_{self.rank}")
        data, index = Path(f"{prefix}.data-00000-of-00001"), Path(f"{prefix}.index")
        self.before_commit(step)
        note = {}
        for name, file, final in (
            ("data", data, data_file(step, self.rank, self.size)),
            ("index", index, index_of(self.rank)),
        ):
            note[name] = measure(str(file), SHA, flush=True)
            file.replace(folder / final)
        return note

    def forget_all_but(self, steps: Sequence[int]) -> None:
        """Forgets all other steps: nothing of them is kept here, or still sent."""
        self.wanted = [step for step in self.wanted if step in steps]
        for step in set(self._notes) - set(steps):
            self._notes.pop(step, None)
        for step in set(self.steps()) - set(steps):
            with contextlib.suppress(OSError):  # another worker of this machine may do so, too
                remove_tree(self.path(step))

    # -- sending ---------------------------------------------------------------------------------------------------

    def _send_next(self) -> None:
        """Sends the first wanted step that has not been sent. Raises StoreError, OSError."""
        for step in [step for step in self.wanted if step in self.unsent()][:1]:
            self.send(step)

    def send(self, step: int) -> None:
        """Sends this worker's part of a step. Raises StoreError, OSError."""
        note = self._notes.get(step)
        if note is None:
            return
        self._allowed()
        try:
            send_part(self.objects, Path(self.path(step)), step, self.rank, note)
        except FileNotFoundError:
            if step not in self._notes:  # it is no longer wanted
                return
            raise
        if self._notes.get(step) is note:  # otherwise it has been written again meanwhile
            self.sent.add(step)


def send_part(objects: ObjectStore, folder: Path, step: int, rank: int, note: Mapping[str, Any]) -> None:
    """Sends a worker's files, then its message about them. Raises StoreError; FileNotFoundError if a file is gone."""
    there = step_folder(step)
    # The message about an earlier part of this step must not be taken for this one's.
    objects.remove(f"{there}/{note_of(rank)}")
    if "error" not in note:
        names = {data_file(step, rank, note["workers"]), index_of(rank)}
        objects.send_all((folder / name, f"{there}/{name}") for name in sorted(names))
    objects.put_text(f"{there}/{note_of(rank)}", json.dumps(note))


def left_parts(folder: Path, run_id: str, newest: int) -> list[tuple[int, int, dict[str, Any]]]:
    """(step, rank, note) of parts below `folder` that earlier processes of a run have written, of steps newer than
    `newest`; oldest first.
    """
    return [
        (step, rank, note)
        for step, rank, note in notes_of_parts(folder, newest)
        if note.get("run_id") == run_id and "error" not in note and is_note(note, rank)
    ]


def notes_of_parts(folder: Path, newest: int = -1) -> list[tuple[int, int, dict[str, Any]]]:
    """(step, rank, note) of all parts below `folder`, whatever run they belong to; otherwise as `left_parts`."""
    found = []
    for step in (store := SnapshotFolder(str(folder / PARTS))).steps():
        for file in sorted(Path(store.path(step)).glob("part-*.json")):
            with contextlib.suppress(OSError, ValueError, RecursionError):
                if step > newest and file.stat().st_size <= _LONGEST_NOTE:
                    note = json.loads(file.read_text(encoding="utf-8"))
                    if isinstance(note, dict):
                        found.append((step, int(file.name[5:10]), note))
    return found


def is_note(note: Any, rank: int) -> bool:
    """Whether this is the message of a worker about its part: an object may be cut off, or come from anyone."""
    if not (isinstance(note, dict) and isinstance(note.get("stamp"), str) and type(note.get("workers")) is int):
        return False
    if not rank < note["workers"] <= _MOST_WORKERS:
        return False
    files = [note.get("data"), note.get("index")]
    return isinstance(note.get("error"), str) or (
        all(isinstance(each, dict) and type(each.get("bytes")) is int and "sha256" in each for each in files)
        and type(note.get("values")) is int
        and (rank > 0 or isinstance(note.get("fields"), dict))
    )
