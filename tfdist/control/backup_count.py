"""Counts the backups that the programs of a launched job have written: they show the launcher of a script its progress.

The launcher names a file in the environment, and the chief's backups are counted in it; how often the job is started
does not matter.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from tfdist.control.own_files import written_whole

VARIABLE = "TFDIST_BACKUP_COUNT"  # the file


def begin(file: Path) -> None:
    """Begins the count of a job that starts, at none. Raises OSError."""
    file.unlink(missing_ok=True)


def read(file: Path) -> int:
    """Reads the count; -1 if there is none, or if it cannot be read."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return -1


def count_one(environ: Mapping[str, str] = os.environ) -> None:
    """Counts one more, if a launcher asks for it. It is a help: what is not counted is no error of the training."""
    if file := environ.get(VARIABLE):
        with contextlib.suppress(OSError), written_whole(Path(file)) as text:
            text.write(str(max(read(Path(file)), 0) + 1))
