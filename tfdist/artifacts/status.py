"""RUN_DIR/status.json: whether a run is going on or finished, and its id. How an evaluator knows when to stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tfdist.control.exit_codes import CheckpointError
from tfdist.control.own_files import written_whole

_FILE = "status.json"


def write_status(run_dir: Path, status: str, run_id: str) -> None:
    """`status`: "running" or "finished". A temporary name, then a rename. Raises CheckpointError."""
    try:
        with written_whole(run_dir / _FILE) as file:
            json.dump({"status": status, "run_id": run_id}, file)
    except OSError as error:
        raise CheckpointError(
            f"{run_dir / _FILE} cannot be written ({error.strerror}): free or repair the folder, then start again."
        ) from None


def read_status(run_dir: Path) -> dict[str, Any]:
    """{"status", "run_id"}; {} if there is none yet, or none that can be read."""
    try:
        found = json.loads((run_dir / _FILE).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return (
        {name: found[name] for name in ("status", "run_id") if isinstance(found.get(name), str)}
        if isinstance(found, dict)
        else {}
    )
