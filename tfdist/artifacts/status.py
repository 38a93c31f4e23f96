"""RUN_DIR/status.json: whether a run is going on or finished, and its id. How an evaluator knows when to stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FILE = "status.json"


def write_status(run_dir: Path, status: str, run_id: str) -> None:
    """`status`: "running" or "finished". A temporary name, then a rename."""
    temporary = run_dir / f".{_FILE}.writing"
    temporary.write_text(json.dumps({"status": status, "run_id": run_id}))
    temporary.replace(run_dir / _FILE)


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
