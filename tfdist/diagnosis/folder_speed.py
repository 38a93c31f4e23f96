"""Checks the run folder: can files be written, flushed and renamed in it, as for snapshots, and how fast?"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from tfdist.diagnosis.findings import Finding, fine, warning, wrong

_NAME = "run folder"
_BYTES = 32 * 2**20
_SLOW, _LEAST_FREE = 20e6, 2**30  # bytes per second; bytes


def run_folder(folder: Path, size: int = _BYTES) -> Finding:
    """Writes `size` bytes where the snapshots will be, flushes, renames, reads and removes them."""
    if folder.exists() and not folder.is_dir():
        return wrong(_NAME, f"--run_dir={folder} is a file.", "give the name of a folder.")
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    written = os.urandom(size)
    try:
        with tempfile.TemporaryDirectory(prefix=".tfdist-doctor-", dir=place) as inside:
            begun = time.monotonic()
            with open(Path(inside) / "writing", "wb") as file:
                file.write(written)
                file.flush()
                os.fsync(file.fileno())
            renamed = Path(inside) / "written"
            os.rename(file.name, renamed)
            seconds = time.monotonic() - begun
            same = renamed.read_bytes() == written
    except OSError as error:
        return wrong(
            _NAME,
            f"--run_dir={folder}: {place} cannot be written ({error.strerror}).",
            "choose a --run_dir that this user may write to and that is mounted for writing on every worker.",
        )
    if not same:
        return wrong(_NAME, f"--run_dir={folder}: the bytes read back differ from those written.", "use another disk.")
    free, speed = shutil.disk_usage(place).free, size / max(seconds, 1e-9)
    said = f"{place} takes {speed / 1e6:,.0f} MB/s, {free / 2**30:,.1f} GiB are free"
    if free < _LEAST_FREE:
        return warning(_NAME, f"{said}: snapshots may not fit.", "make room, or choose another --run_dir.")
    if speed < _SLOW:
        return warning(_NAME, f"{said}: snapshots will take long.", "choose a faster --run_dir; save less often.")
    return fine(_NAME, said)
