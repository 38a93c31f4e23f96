"""The end of a run in one table and one JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_summary(path: Path, values: Mapping[str, Any]) -> None:
    """Writes the values as JSON; a temporary name, flushed, renamed."""
    temporary = path.with_name(f".{path.name}.writing")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(values, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def print_summary(values: Mapping[str, Any]) -> None:
    """Prints the values as two columns, those that there are."""
    width = max(len(name) for name in values)
    for name, value in values.items():
        if value in ("", None, {}):
            continue
        if isinstance(value, Mapping):
            value = ", ".join(f"{key} {_number(item)}" for key, item in value.items())
        print(f"  {name:<{width}}  {_number(value)}", flush=True)


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4f}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
