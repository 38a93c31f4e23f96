"""RUN_DIR/status.json: its name, and a parser of its content."""

from __future__ import annotations

import json
from typing import Any

STATUS_FILE = "status.json"


def parse_status(text: str) -> dict[str, Any]:
    """Parses the file's content: returns {"status", "run_id"}; {} if it is damaged."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return (
        {name: found[name] for name in ("status", "run_id") if isinstance(found.get(name), str)}
        if isinstance(found, dict)
        else {}
    )
