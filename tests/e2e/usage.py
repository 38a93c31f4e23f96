"""A tracker that records what a worker holds while it trains: `--trackers=tests.e2e.usage:track`."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tfdist.telemetry.events import Event, Tell
from tfdist.telemetry.trackers import Run

FILE = "usage.jsonl"  # in the run folder


def usage() -> dict[str, float]:
    """Returns threads, file descriptors and resident memory (MiB) of this process."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "resident_mib": resident / 2**20,
    }


def track(run: Run) -> Tell:
    """Writes the usage of the chief at every log interval."""

    def write(event: Event) -> None:
        if event.kind == "train":
            with open(run.folder / FILE, "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": event.step, **usage()}) + "\n")

    return write


def measured(run_dir: Path) -> dict[int, dict[str, float]]:
    """step -> the usage that was measured there."""
    return {(record := json.loads(line))["step"]: record for line in (run_dir / FILE).read_text().splitlines()}
