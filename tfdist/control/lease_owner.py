"""Who holds a lease (lease.py), and whether that process still lives."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Owner:
    """Who holds a lease. All are text, so that a lease of any version can be shown."""

    host: str
    pid: str
    since: str
    job: str  # "": nothing to go by
    machine: str  # changes with every boot and every container: only within one are process numbers comparable
    started: str  # of the process, in the kernel's ticks
    id: str

    @classmethod
    def myself(cls, job: str) -> Owner:
        pid = str(os.getpid())
        return cls(
            host=socket.gethostname(),
            pid=pid,
            since=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
            job=job,
            machine=_machine(),
            started=_started(pid),
            id=uuid.uuid4().hex,
        )

    @classmethod
    def read(cls, text: str) -> Owner | None:
        """None if this is no lease."""
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            found = json.loads(text)
            return cls(**{field.name: str(found[field.name]) for field in fields(cls)})
        return None

    def describe(self) -> str:
        return f"process {_printable(self.pid)} on {_printable(self.host)}, since {_printable(self.since)}"

    def is_here(self) -> bool:
        """Whether it is, or was, on this machine."""
        return bool(self.machine) and self.machine == _machine()

    def runs_here(self) -> bool:
        """Of an owner on this machine."""
        return bool(self.started) and _started(self.pid) == self.started


def _printable(text: str) -> str:
    return "".join(character for character in text[:100] if character.isprintable())


def _machine() -> str:
    """ "": not known."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: str) -> str:
    """When a process was started, in ticks since the boot; "" if there is none, or only what is left of it."""
    try:
        status = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()
        return "" if status[0] in "ZX" else status[19]
    except (OSError, IndexError, ValueError):
        return ""
