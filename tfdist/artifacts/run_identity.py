"""Which run a local folder belongs to.

status.json says so. After a power failure that may be empty; snapshots, which are flushed to the disk, say so, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tfdist.artifacts import manifest
from tfdist.artifacts.shard_upload import notes_of_parts
from tfdist.artifacts.snapshot_folder import SnapshotFolder
from tfdist.artifacts.status import read_status
from tfdist.control.run_address import SNAPSHOTS


def run_of(folder: Path) -> str:
    """The id of the run in `folder`: from status.json, or from its newest snapshot, or from a part of one; "" if none
    of them says it."""
    return read_status(folder).get("run_id") or next(filter(None, _named_by_snapshots(folder)), "")


def run_of_snapshot(path: str | Path) -> str:
    """The id of the run that the snapshot at `path` belongs to; "" if its manifest is damaged, or does not say."""
    file = Path(path, manifest.MANIFEST)
    try:
        return manifest.run_of(file.read_text(encoding="utf-8")) if file.is_file() else ""
    except (OSError, ValueError):
        return ""


def _named_by_snapshots(folder: Path) -> Iterator[str]:
    store = SnapshotFolder(str(folder / SNAPSHOTS))
    for step in reversed(store.steps()):
        yield run_of_snapshot(store.path(step))
    for _, _, note in reversed(notes_of_parts(folder)):
        yield note["run_id"] if isinstance(note.get("run_id"), str) else ""
