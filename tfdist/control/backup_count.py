"""Counts the backups that a launched script has written, which show the launcher its progress.

The launcher names a file in the environment, in which the chief's backups are counted, across restarts of the job.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from tfdist.control.exit_codes import ConfigError
from tfdist.control.own_files import written_whole

VARIABLE = "TFDIST_BACKUP_COUNT"  # the file


def begin(file: Path) -> None:
    """Resets the count at the start of a job. Raises ConfigError."""
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be removed ({error.strerror}): remove it, or start the launcher in another folder."
        ) from None


def read(file: Path) -> int:
    """Reads the count; -1 if there is none or it cannot be read."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return -1


def count_one(environ: Mapping[str, str] = os.environ) -> None:
    """Adds one to the count, if a launcher asks for it. A failure to count is ignored: it must not end the training."""
    if file := environ.get(VARIABLE):
        with contextlib.suppress(OSError), written_whole(Path(file)) as text:
            text.write(str(max(read(Path(file)), 0) + 1))
