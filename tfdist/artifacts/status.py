"""RUN_DIR/status.json: whether a run is active or has ended, and its id. Tells an evaluator when to stop."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from tfdist.control.exit_codes import RESTARTABLE, CheckpointError, ExitCode, TfdistError
from tfdist.control.own_files import written_whole
from tfdist.control.run_address import is_url
from tfdist.control.status_file import STATUS_FILE, parse_status
from tfdist.storage.object_store import ObjectStore
from tfdist.storage.store_errors import StoreError


def write_status(run_dir: Path, status: str, run_id: str) -> None:
    """Writes the status: "running", "finished" or "failed"; atomic and flushed to the disk. Raises CheckpointError."""
    try:
        with written_whole(run_dir / STATUS_FILE, flushed=True) as file:
            json.dump({"status": status, "run_id": run_id}, file)
    except OSError as error:
        raise CheckpointError(
            f"{run_dir / STATUS_FILE} cannot be written ({error.strerror}): free or repair the folder, then"
            " start again."
        ) from None


def note_failure(run_dir: Path, error: BaseException, run_id: str) -> None:
    """Writes the status "failed" if nobody will restart the run after this error. Not after a ConfigError: the folder
    may have been taken over by another job."""
    if isinstance(error, TfdistError) and error.exit_code not in {*RESTARTABLE, ExitCode.CONFIG}:
        with contextlib.suppress(CheckpointError):
            write_status(run_dir, "failed", run_id)


def read_status(run_dir: Path) -> dict[str, Any]:
    """{"status", "run_id"}; {} if there is no readable status yet."""
    try:
        return parse_status((run_dir / STATUS_FILE).read_text())
    except (OSError, ValueError):
        return {}


def when_written(run_dir: Path) -> int:
    """When the status was written, for `is_finished`; -1: never."""
    try:
        return (run_dir / STATUS_FILE).stat().st_mtime_ns
    except OSError:
        return -1


def is_finished(run_dir: str, folder: Path, seconds: float = 30.0, after: int = -1) -> bool:
    """Whether the run is over, for processes that have lost its chief. For a run in an object store the chief writes
    this when all has been sent, so wait for it a while; a working copy may be of an earlier chief.

    folder: the run's local folder. after: a status in a folder that was written then (`when_written`) does not count:
    it is that of a run that goes on with more steps.
    """
    if not is_url(run_dir):
        return read_status(folder).get("status") == "finished" and when_written(folder) != after
    deadline, objects = time.monotonic() + seconds, None
    while True:
        with contextlib.suppress(StoreError):
            objects = objects or ObjectStore(run_dir)
            if parse_status(objects.text(STATUS_FILE) or "").get("status") == "finished":
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(1.0)
