"""Where a snapshot is in an object store, and its manifest there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.artifacts.manifest import MANIFEST, parse
from tfdist.control.exit_codes import CheckpointError
from tfdist.control.run_address import SNAPSHOTS
from tfdist.storage.object_store import ObjectStore


def step_folder(step: int) -> str:
    """The folder of a snapshot in the store."""
    return f"{SNAPSHOTS}/step-{step:08d}"


def whole_manifest(
    objects: ObjectStore, step: int, required: Sequence[str], listed: Mapping[str, int] | None = None
) -> tuple[str, dict[str, Any]]:
    """Returns the manifest of a snapshot in the store, as text and as entries, if all its files are there in full size.

    listed: sizes by name from a listing, which may be outdated: the store is asked again only for other files. Raises
    CheckpointError, StoreError.
    """
    name, listed = step_folder(step), listed or {}
    text = objects.text(f"{name}/{MANIFEST}")
    if text is None:
        raise CheckpointError(f"{name}/{MANIFEST} is missing.")
    manifest = parse(text, f"{name}/{MANIFEST}", step, required)
    for file, entry in manifest["files"].items():
        if listed.get(f"{name}/{file}") == entry["bytes"]:
            continue
        # If a file later arrives with another size, the transfer was broken and is tried again.
        if (size := objects.size(f"{name}/{file}")) != entry["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes instead of {entry['bytes']}"
            raise CheckpointError(f"{name}/{file} {found}.")
    return text, manifest
