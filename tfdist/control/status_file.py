"""RUN_DIR/status.json: its name, and a parser of its content."""

from __future__ import annotations

import json
from typing import Any

STATUS_FILE = "status.json"
_KINDS = {"status": str, "run_id": str, "attempt": int}


def parse_status(text: str) -> dict[str, Any]:
    """Parses the file's content: returns {"status", "run_id", "attempt"}; {} if it is damaged."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return (
        {name: found[name] for name, kind in _KINDS.items() if type(found.get(name)) is kind}
        if isinstance(found, dict)
        else {}
    )
