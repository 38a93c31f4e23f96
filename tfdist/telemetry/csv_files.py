"""RUN_DIR/metrics.csv, a row per train event, and RUN_DIR/evaluations.csv, a row per evaluation: for spreadsheets.

Columns keep their places over restarts; a value that first appears later gets a new column on the right. At the start
of an attempt the rows are rewritten from the JSONL log, so that they show one consistent history of the run. Rows of
steps before all that the log has (it may have been renamed, as by logrotate) stay.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tfdist.control.own_files import appended_to, written_whole
from tfdist.telemetry.events import Event, Observer
from tfdist.telemetry.jsonl import read_jsonl
from tfdist.telemetry.trackers import Run, numbers

FILES = {"train": "metrics.csv", "eval": "evaluations.csv"}


def track(run: Run) -> CsvFiles:
    """Makes the tracker `csv`."""
    starts = [record["step"] for record in read_jsonl(run.log) if record["kind"] == "start"]
    return CsvFiles(run.folder, run.replay(), min([*starts, run.resumed_step]))


class CsvFiles(Observer):
    """Writes events as rows and flushes each.

    history: the events before this attempt. kept_to: rows up to this step stay, but for those that the events
    replace.
    """

    def __init__(self, folder: Path, history: Iterable[Event], kept_to: int):
        events = list(history)
        self._tables = {
            kind: _Table(folder / name, [event for event in events if event.kind == kind], kept_to)
            for kind, name in FILES.items()
        }

    def __call__(self, event: Event) -> None:
        if event.kind in self._tables:
            self._tables[event.kind].add(event)

    def close(self) -> None:
        for table in self._tables.values():
            table.close()


class _Table:
    """A CSV file. Rows are kept in memory, too, because a new column or a rollback rewrites the file."""

    def __init__(self, path: Path, events: list[Event], kept_to: int):
        self._path, self._file = path, None
        self._columns = ["step", "time"]
        self._rows: list[dict] = []
        if events or path.exists():
            for row in _rows_to(path, kept_to):
                self._append_row(row)
            for event in events:
                self._append(event)
            self._rewrite()

    def add(self, event: Event) -> None:
        if self._append(event) or self._file is None:
            self._rewrite()
        else:
            self._writer.writerow(self._rows[-1])
            self._file.flush()

    def _append(self, event: Event) -> bool:
        """Adds the event's row. Returns whether anything else has changed, too."""
        time = datetime.fromtimestamp(event.time, UTC).isoformat(timespec="milliseconds")
        return self._append_row({"step": event.step, "time": time, **numbers(event)})

    def _append_row(self, row: dict) -> bool:
        kept = (
            [earlier for earlier in self._rows if earlier["step"] < row["step"]]
            if self._rows and self._rows[-1]["step"] >= row["step"]
            else self._rows
        )
        new = [name for name in row if name not in self._columns]
        changed = bool(new) or kept is not self._rows
        self._columns += new
        self._rows = kept
        self._rows.append(row)
        return changed

    def _rewrite(self) -> None:
        self.close()
        with written_whole(self._path, newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(self._rows)
        self._file = open(appended_to(self._path), "a", encoding="utf-8", newline="")  # noqa: SIM115 - stays open
        self._writer = csv.DictWriter(self._file, self._columns)

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None


def _rows_to(path: Path, step: int) -> list[dict[str, Any]]:
    """Returns the whole rows of a file up to a step; none if there is no file. (A process may have been killed in the
    middle of the last one.)"""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    rows = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
    whole = [row for row in rows if None not in (*row, *row.values()) and row.get("step", "").isdecimal()]
    return [{**row, "step": int(row["step"])} for row in whole if int(row["step"]) <= step]
