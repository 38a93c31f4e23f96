"""Checks a run's object stores: can objects be written, listed, read and removed in those of --run_dir and
--backup_dir, and how fast; can the store of --data_dir be listed and read?
"""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from tfdist.config import Config
from tfdist.control.exit_codes import TfdistError
from tfdist.control.run_address import is_url
from tfdist.diagnosis.findings import Finding, fine, warning, wrong
from tfdist.storage.object_store import ObjectStore
from tfdist.storage.store_errors import StoreError

_BYTES = 8 * 2**20
_READ_BYTES = 2**16
_SLOW = 5e6  # bytes per second
_PATIENCE_SECONDS = 10.0


def stores(config: Config) -> Iterator[Finding]:
    """Checks the object store of each URL in the flags and yields a finding for each."""
    if is_url(config.run.run_dir):
        yield store("run", config.run.run_dir)
    if is_url(config.checkpoint.backup_dir):
        yield store("backup", config.checkpoint.backup_dir)
    if is_url(config.data.data_dir):
        yield data_store(config.data.data_dir)


def store(kind: str, url: str) -> Finding:
    """Does with one object what a run does with its objects. kind: "run" or "backup"."""
    folder, flag = f"doctor-{uuid.uuid4().hex[:8]}", f"--{kind}_dir"
    name = f"{folder}/object"
    try:
        objects = ObjectStore(url, _PATIENCE_SECONDS)
        with tempfile.TemporaryDirectory(prefix="tfdist-doctor-") as inside:
            sent, brought = Path(inside) / "sent", Path(inside) / "brought"
            sent.write_bytes(os.urandom(_BYTES))
            begun = time.monotonic()
            objects.send(sent, name)
            seconds = time.monotonic() - begun
            listed = objects.names(folder)
            objects.fetch(name, brought, _BYTES)
            objects.remove(name)
            same = listed == {name: _BYTES} and sent.read_bytes() == brought.read_bytes()
    except (StoreError, TfdistError, FileNotFoundError) as error:
        return _unusable(kind, flag, url, error)
    if not same:
        return wrong(
            f"{kind} store", f"{flag}={url}: the bytes read back differ from those written.", "use another store."
        )
    said = f"{url} takes {_BYTES / max(seconds, 1e-9) / 1e6:,.0f} MB/s"
    if _BYTES / max(seconds, 1e-9) < _SLOW:
        late = f"{said}: snapshots will take long to arrive."
        return warning(f"{kind} store", late, "save less often, or use a nearer store.")
    return fine(f"{kind} store", said)


def data_store(url: str) -> Finding:
    """Lists the store's objects, and reads the beginning of one of them."""
    try:
        objects = ObjectStore(url, _PATIENCE_SECONDS)
        sizes = objects.names()
        for name in [name for name, size in sizes.items() if size][:1]:
            objects.piece(name, 0, min(sizes[name], _READ_BYTES))
    except (StoreError, TfdistError, FileNotFoundError) as error:
        return _unusable("data", "--data_dir", url, error)
    if not sizes:
        return wrong("data store", f"--data_dir={url} contains no objects.", "put the data there, or correct the URL.")
    return fine("data store", f"{url} contains {len(sizes):,} objects, {sum(sizes.values()) / 1e9:,.3g} GB")


def _unusable(kind: str, flag: str, url: str, error: Exception) -> Finding:
    what = f"{flag}={url}: {error}.".replace("..", ".")
    return wrong(f"{kind} store", what, "fix that, then run this again.")
