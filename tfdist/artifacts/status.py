"""RUN_DIR/status.json: whether a run is active or has ended, and its id. Tells an evaluator when to stop."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdist.control.exit_codes import RESTARTABLE, CheckpointError, ExitCode, TfdistError
from tfdist.control.own_files import written_whole
from tfdist.control.run_address import is_url
from tfdist.control.status_file import STATUS_FILE, parse_status
from tfdist.storage.object_store import ObjectStore
from tfdist.storage.store_errors import StoreError


def write_status(run_dir: Path, status: str, run_id: str, attempt: int = 0) -> None:
    """Writes the status: "running", "finished" or "failed"; atomic and flushed to the disk. Raises CheckpointError."""
    try:
        with written_whole(run_dir / STATUS_FILE, flushed=True) as file:
            json.dump({"status": status, "run_id": run_id, "attempt": attempt}, file)
    except OSError as error:
        raise CheckpointError(
            f"{run_dir / STATUS_FILE} cannot be written ({error.strerror}): free or repair the folder, then"
            " start again."
        ) from None


def note_failure(run_dir: Path, error: BaseException, run_id: str, attempt: int = 0) -> None:
    """Writes the status "failed" if nobody will restart the run after this error. Not after a ConfigError: the folder
    may have been taken over by another job."""
    if isinstance(error, TfdistError) and error.exit_code not in {*RESTARTABLE, ExitCode.CONFIG}:
        with contextlib.suppress(CheckpointError):
            write_status(run_dir, "failed", run_id, attempt)


def read_status(run_dir: Path) -> dict[str, Any]:
    """{"status", "run_id", "attempt"}; {} if there is no readable status yet."""
    try:
        return parse_status((run_dir / STATUS_FILE).read_text())
    except (OSError, ValueError):
        return {}


def stored_status(run_dir: str, folder: Path) -> dict[str, Any]:
    """The status of a run in a folder or an object store, as from `read_status`; {} if the store cannot be read.

    folder: the run's local folder.
    """
    if not is_url(run_dir):
        return read_status(folder)
    with contextlib.suppress(StoreError):
        return parse_status(ObjectStore(run_dir).text(STATUS_FILE) or "")
    return {}


def is_finished(run_dir: str, folder: Path, before: Mapping[str, Any], seconds: float = 30.0) -> bool:
    """Whether the run is over, for processes that have lost its chief. In an object store the chief writes this when
    all has been sent, so wait for it a while.

    folder: the run's local folder; it is not asked about a run in a store, as it may be that of an earlier chief.
    before: the `stored_status` when this process began. It does not count: a finished run may go on with more steps.
    """

    def is_so(found: Mapping[str, Any]) -> bool:
        return found.get("status") == "finished" and found != before

    if not is_url(run_dir):
        return is_so(read_status(folder))
    deadline, objects = time.monotonic() + seconds, None
    while True:
        with contextlib.suppress(StoreError):
            objects = objects or ObjectStore(run_dir)
            if is_so(parse_status(objects.text(STATUS_FILE) or "")):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(1.0)
