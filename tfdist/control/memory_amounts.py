"""Reads amounts of memory that Linux gives under /proc. Units: bytes."""

from __future__ import annotations

import contextlib
from pathlib import Path

PROCESS, MACHINE = Path("/proc/self/status"), Path("/proc/meminfo")


def amounts(path: Path) -> dict[str, float]:
    """Returns the lines "name:  123 kB" of a file under /proc as name -> bytes; {} if there is no such file."""
    found = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            if value.endswith(" kB"):
                found[name] = 1024.0 * float(value.removesuffix(" kB"))
    return found
