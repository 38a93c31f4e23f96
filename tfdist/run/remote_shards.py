"""The parts of snapshots in an object store, as one of several workers without a shared folder writes and reads them.

A state that is sharded over the workers is nowhere whole. Each worker sends its own part (artifacts/shard_upload.py),
the chief makes snapshots of the parts (sharded_commit.py), and each worker brings only what it needs
(partial_download.py).
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tfdist.artifacts import restore
from tfdist.artifacts.partial_download import PartialDownload
from tfdist.artifacts.remote_snapshots import RemoteSnapshots
from tfdist.artifacts.run_identity import run_of
from tfdist.artifacts.shard_upload import PARTS, ShardUpload, left_parts, send_part
from tfdist.artifacts.sharded_commit import ShardedCommit
from tfdist.artifacts.snapshot_folder import FolderOptions, Snapshot
from tfdist.control.exit_codes import CheckpointError, StartupError
from tfdist.control.own_files import lock
from tfdist.run.remote_run import RemoteRun
from tfdist.runtime.base import Runtime
from tfdist.runtime.decisions import of_the_chief, texts_of_all
from tfdist.storage.store_errors import StoreError, as_sentence
from tfdist.training.parallel.sharded_state import ShardedState

_FINE, _DAMAGED, _AWAY = "f", "d", "a"  # one byte each
_SENTENCE_BYTES = 400


class RemoteShards:
    """One worker's parts in the store. Constructed on all workers at once. remote: the chief's snapshots there.

    Raises TfdistError on all workers if the chief cannot use the store.
    """

    def __init__(
        self,
        runtime: Runtime,
        stored: RemoteRun,
        before_commit: Callable[[int], None],
        remote: RemoteSnapshots | None,
    ):
        self._runtime, self._stored, self._remote = runtime, stored, remote
        agreed = self._agree_to_begin()
        self._newest: int = agreed["newest"]  # newest step in the store
        self.writes = ShardUpload(
            stored.objects,
            stored.folder,
            before_commit,
            runtime.rank,
            runtime.size,
            agreed["token"],
            stored.follow(agreed["lease"]),
        )
        options = FolderOptions(place=stored.snapshots, required=restore.REQUIRED)
        self.reads = PartialDownload(stored.objects, stored.folder, remote, options)
        self._commit = ShardedCommit(stored.objects, self.writes, remote) if remote else None
        self._send_left(agreed["run_id"])
        stored.sends_parts(self.writes.sender, self._commit.sender if self._commit else None)
        self.writes.sender.start()

    def _agree_to_begin(self) -> dict[str, Any]:
        remote = self._remote

        def begin() -> dict[str, Any]:
            if not remote:
                return {}
            with as_sentence():
                newest = max(remote.steps(), default=-1)
            return {
                "token": uuid.uuid4().hex[:8],
                "lease": self._stored.lease_id,
                "run_id": run_of(self._stored.folder),
                "newest": newest,
            }

        return of_the_chief(self._runtime, begin)

    # -- restoring -------------------------------------------------------------------------------------------------

    def _send_left(self, run_id: str) -> None:
        """Sends what earlier processes on this machine had no time to send. A collective call. Parts that cannot be
        sent belong to no snapshot; the run then resumes from an older one."""
        folder = self._stored.folder / PARTS
        with contextlib.suppress(StoreError, OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with lock(folder / ".lock", wait=True):  # excludes other workers of this machine
                left = left_parts(self._stored.folder, run_id, self._newest) if run_id else []
                for step, rank, note in left:
                    send_part(self._stored.objects, Path(self.writes.path(step)), step, rank, note)
                    Path(self.writes.path(step), f"part-{rank:05d}.json").unlink(missing_ok=True)
        self._runtime.barrier()

    def make_left(self) -> None:
        """Lets the chief make a snapshot of left parts, if all of them are there. Raises StoreError, OSError."""
        assert self._commit
        self._commit.make_left(self._newest)

    def start(self) -> None:
        """Lets the chief make snapshots of parts from now on."""
        assert self._commit
        self._commit.sender.start()

    def finish_or_drop(self, seconds: float) -> None:
        """Waits for up to `seconds` for parts that are being gathered, then drops them: the run is about to go back."""
        assert self._commit
        self._commit.sender.finish_soon(seconds)
        self._commit.drop_all()

    def bring(self, manifest: Mapping[str, Any], state: ShardedState) -> str:
        """Brings this worker's part of the chief's choice. A collective call. Returns why it is damaged, or "": then
        the chief must choose another. Raises StartupError on all workers if one of them cannot reach the store."""
        snapshot, verdict, sentence = self.snapshot(manifest), _FINE, ""
        try:
            self.reads.bring(snapshot, state.wanted(manifest["variables"]))
        except CheckpointError as error:
            verdict, sentence = _DAMAGED, str(error)
        except OSError as error:
            verdict, sentence = _AWAY, str(error)
        verdicts = [
            (text[0], text[1:].strip()) for text in texts_of_all(self._runtime, verdict + sentence, _SENTENCE_BYTES)
        ]
        for rank, (verdict, sentence) in enumerate(verdicts):
            if verdict == _AWAY:
                raise StartupError(
                    f"Rank {rank} could not fetch its part of {snapshot.path} ({sentence}): check that it can reach the"
                    " store, and write to --cache_dir."
                )
        damaged = [
            f"rank {rank}: {sentence}" for rank, (verdict, sentence) in enumerate(verdicts) if verdict == _DAMAGED
        ]
        if damaged and self._remote:
            self._remote.damaged_there[snapshot.step] = damaged[0]
        return damaged[0] if damaged else ""

    def snapshot(self, manifest: Mapping[str, Any]) -> Snapshot:
        """The chief's choice, as a snapshot in the local folder."""
        return Snapshot(self.reads.path(manifest["step"]), manifest["step"], manifest)

    # -- saving ----------------------------------------------------------------------------------------------------

    def agree(self, step: int) -> str:
        """Tells all workers, before each save, of which steps the chief wants the parts. A collective call. Returns why
        there can be no snapshot of this step, or ""."""
        message: dict[str, Any] = {}
        if self._commit:
            try:
                message = {"wanted": self._commit.announce(step)}
            except StoreError as error:
                message = {"error": str(error)}
        message = self._runtime.broadcast_object(message)
        self.writes.wanted = message.get("wanted", self.writes.wanted)
        return message.get("error", "")
