"""The object store of --run_dir: can objects be written, listed, read and removed there, and how fast?"""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from pathlib import Path

from tfdist.control.exit_codes import TfdistError
from tfdist.diagnosis.findings import Finding, fine, warning, wrong
from tfdist.storage.object_store import ObjectStore
from tfdist.storage.store_errors import StoreError

_NAME = "run store"
_BYTES = 8 * 2**20
_SLOW = 5e6  # bytes a second
_PATIENCE_SECONDS = 10.0


def store(url: str, size: int = _BYTES) -> Finding:
    """Does with one object of `size` bytes what a run does with its own."""
    folder = f"doctor-{uuid.uuid4().hex[:8]}"
    name = f"{folder}/object"
    try:
        objects = ObjectStore(url, _PATIENCE_SECONDS)
        with tempfile.TemporaryDirectory(prefix="tfdist-doctor-") as inside:
            sent, brought = Path(inside) / "sent", Path(inside) / "brought"
            sent.write_bytes(os.urandom(size))
            begun = time.monotonic()
            objects.send(sent, name)
            seconds = time.monotonic() - begun
            listed = objects.names(folder)
            objects.fetch(name, brought, size)
            objects.remove(name)
            same = listed == {name: size} and sent.read_bytes() == brought.read_bytes()
    except (StoreError, TfdistError, FileNotFoundError) as error:
        return wrong(_NAME, f"--run_dir={url}: {error}.".replace("..", "."), "what it says; then run this again.")
    if not same:
        return wrong(_NAME, f"--run_dir={url}: other bytes came back than were written.", "use another store.")
    said = f"{url} takes {size / max(seconds, 1e-9) / 1e6:,.0f} MB/s"
    if size / max(seconds, 1e-9) < _SLOW:
        return warning(_NAME, f"{said}: snapshots will take long to arrive.", "save less often, or use a nearer store.")
    return fine(_NAME, said)
