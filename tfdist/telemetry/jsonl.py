"""One JSON object per line and rank: RUN_DIR/logs/rank-K.jsonl.

Schema, version 1: {"v": 1, "time": ISO 8601 in UTC, "run_id", "attempt": number of earlier starts of the run,
"rank", "host", "kind", "step", "values": {name: number, text, true, false or null}}. Not-a-number and infinities are
the texts "nan", "inf", "-inf", since JSON has no numbers for them. Kinds and values: events.py.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tfdist.control.exit_codes import ConfigError
from tfdist.telemetry.appended_file import AppendedFile
from tfdist.telemetry.events import Event, Observer

VERSION = 1
_TYPES = {"attempt": int, "kind": str, "step": int, "values": dict}
_NEW_YEAR = "1970-01-01T00:00:00+00:00"  # for a record without a time
_NOT_JSON = ("nan", "inf", "-inf")
_KEPT = ("train", "eval")  # kinds that belong to the history


@contextlib.contextmanager
def _usable(path: Path) -> Iterator[None]:
    """Context manager: raises ConfigError if the log cannot be read or written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be used as the log of a run ({error.strerror}): fix or remove it, or give another"
            " --run_dir."
        ) from None


class _Log(AppendedFile):
    def __init__(self, path: Path, run_id: str):
        self._run_id = run_id
        super().__init__(path)

    def check(self) -> None:
        try:
            last = deque(read_jsonl(self.path), maxlen=1)
        except ConfigError:  # it cannot be opened, either, which may pass: the events wait
            return
        for record in last:
            if record.get("run_id") != self._run_id:
                raise ConfigError(f"{self.path} now belongs to another run: this one no longer has a log.")

    def beginning(self) -> bytes:
        """After half a line that a killed process left: ends that line, which would else take the next one with it."""
        torn = self.path.exists() and self.path.stat().st_size > 0 and not _ends_with_newline(self.path)
        return b"\n" if torn else b""


class JsonlObserver(Observer):
    """Appends events to a file, each as a line. If the disk is full, they wait (appended_file.py)."""

    def __init__(self, path: Path, *, run_id: str, attempt: int, rank: int):
        self._constant = {
            "v": VERSION,
            "run_id": run_id,
            "attempt": attempt,
            "rank": rank,
            "host": socket.gethostname(),
        }
        with _usable(path):
            self._log = _Log(path, run_id)

    def __call__(self, event: Event) -> None:
        time = datetime.fromtimestamp(event.time, UTC).isoformat(timespec="milliseconds")
        values = {name: plain(value) for name, value in event.values.items() if name != "flags"}
        line = json.dumps({**self._constant, "time": time, "kind": event.kind, "step": event.step, "values": values})
        self._log.write(f"{line}\n".encode())

    def close(self) -> None:
        self._log.close()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a file. Skips invalid lines, such as an unfinished last line of a killed process."""
    if not path.exists():
        return
    with _usable(path):
        file = open(path, encoding="utf-8", errors="replace")  # noqa: SIM115 - closed below
    with file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if (
                isinstance(record, dict)
                and record.get("v") == VERSION
                and all(type(record.get(name)) is kind for name, kind in _TYPES.items())
                and _is_time(record.get("time", _NEW_YEAR))
            ):
                yield record


def _is_time(text: Any) -> bool:
    try:
        datetime.fromisoformat(text)
    except (ValueError, TypeError):
        return False
    return True


def history(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the train and eval records of the run's one history, by step, each step of a kind once: an attempt, or a
    rollback, replaces all earlier records of later steps."""
    kept: list[Mapping[str, Any]] = []
    for record in records:
        kind, step = record["kind"], record["step"]
        if kind not in (*_KEPT, "start"):
            continue
        at = len(kept)
        while at and kept[at - 1]["step"] >= step:
            at -= 1
        kept[at:] = [each for each in kept[at:] if each["step"] == step and each["kind"] != kind]
        if kind in _KEPT:
            kept.append(record)
    return kept


def replay(path: Path, last_step: int) -> list[Event]:
    """Returns the events of a log's history up to `last_step`."""
    found = []
    for record in history(read_jsonl(path)):
        if record["step"] <= last_step:
            values = {name: float(value) if value in _NOT_JSON else value for name, value in record["values"].items()}
            time = datetime.fromisoformat(record.get("time", _NEW_YEAR)).timestamp()
            found.append(Event(record["kind"], record["step"], values, time))
    return found


def next_attempt(path: Path) -> int:
    """Returns the number of the attempt that starts now: 0 for the first, else one more than the log's last."""
    return max((record["attempt"] for record in read_jsonl(path)), default=-1) + 1


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def plain(value: Any) -> Any:
    """Returns the value as JSON can hold it: NumPy scalars as Python's, not-a-number and infinities as text."""
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    value = value.item() if hasattr(value, "item") else value
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def steady_values(records: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """Returns the positive, finite values of this name in train events, without the first of each attempt, which
    includes tracing and compiling."""
    found, begun = list[float](), set[int]()
    for record in records:
        if record["kind"] == "train":
            value = record["values"].get(name)
            if record["attempt"] in begun and isinstance(value, int | float) and 0 < value < math.inf:
                found.append(value)
            begun.add(record["attempt"])
    return found
