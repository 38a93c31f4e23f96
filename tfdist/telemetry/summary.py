"""The summary at the end of a run: one table and one JSON file."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdist.control.own_files import written_whole
from tfdist.telemetry.jsonl import plain


def write_summary(path: Path, values: Mapping[str, Any]) -> None:
    """Writes the values as JSON, atomically: a temporary file, flushed, then renamed.

    Raises: OSError if the folder cannot be written.
    """
    with written_whole(path, flushed=True) as file:
        json.dump(plain(values), file, indent=1)


def print_summary(values: Mapping[str, Any]) -> None:
    """Prints the values that are not empty in two columns: a table on a terminal, plain lines elsewhere."""
    rows = [(name, _text(value)) for name, value in values.items() if value not in ("", None, {})]
    if not sys.stdout.isatty():
        width = max((len(name) for name, _ in rows), default=0)
        for name, text in rows:
            print(f"  {name:<{width}}  {text}", flush=True)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False)
    for name, text in rows:
        table.add_row(Text(name, style="bold"), Text(text, overflow="fold"))  # paths are shown whole, for copying
    Console().print(table)


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items())
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
