"""The owner of a lease (lease.py, storage/store_lease.py), whether that process still lives, and when whoever wants the
lease may take it over."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tfdist.control.exit_codes import ConfigError, ExitCode, end_process
from tfdist.control.terminal import say


@dataclass(frozen=True)
class Owner:
    """The process that holds a lease. All are text, so that a lease of any version can be shown."""

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
        """Reads the owner in a lease's text; None if this is no lease."""
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            found = json.loads(text)
            return cls(**{field.name: str(found[field.name]) for field in fields(cls)})
        return None

    def lease(self) -> str:
        """The lease that says so, renewed now."""
        renewed = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return json.dumps({**asdict(self), "renewed": renewed}, indent=1)

    def describe(self) -> str:
        return f"process {_printable(self.pid)} on {_printable(self.host)}, since {_printable(self.since)}"

    def is_here(self) -> bool:
        """Whether it is, or was, on this machine."""
        return bool(self.machine) and self.machine == _machine()

    def runs_here(self) -> bool:
        """Whether an owner on this machine still runs."""
        return bool(self.started) and _started(self.pid) == self.started


@dataclass(frozen=True)
class Patience:
    """The time to wait for an owner, in seconds of the observer's clock."""

    dead: float  # without a renewal, after which it counts as dead
    damaged: float  # for a lease that cannot be read: it may just be written
    to_end: float = 5.0  # that an owner on the same machine has, which may have been killed a moment ago


class Watched:
    """Another's lease, as whoever wants it sees it, look by look.

    place: where it lies. name: how the user knows what it is of. mine: who wants it.
    """

    def __init__(self, place: str, name: str, mine: Owner, patience: Patience):
        self._place, self._name, self._mine, self._patience = place, name, mine, patience
        self._begun = self._changed = time.monotonic()
        self._seen, self._said = "", False

    def is_free(self, text: str) -> bool:
        """Whether it may be taken over, of what it says now. Raises ConfigError if its owner lives."""
        now, owner, renewed = time.monotonic(), Owner.read(text), False
        if text != self._seen:
            renewed = owner is not None and owner == Owner.read(self._seen)
            self._seen, self._changed = text, now
        unchanged = now - self._changed
        if owner is None:
            return unchanged > self._patience.damaged
        if owner.is_here():
            if owner.runs_here() and now - self._begun > self._patience.to_end:
                raise in_use(self._name, owner)
            return not owner.runs_here()
        if owner.job and owner.job == self._mine.job or unchanged > self._patience.dead:
            return True
        if renewed:
            raise in_use(self._name, owner)
        self._say_once(owner)
        return False

    def _say_once(self, owner: Owner) -> None:
        if not self._said:
            self._said = True
            say(
                f"{self._place} names {owner.describe()}; looking for at most {self._patience.dead:g} s whether"
                " it still lives."
            )


def in_use(name: str, owner: Owner) -> ConfigError:
    """The error for a job that comes second."""
    return ConfigError(
        f"{name} is in use by another job ({owner.describe()}): choose another folder, or end that job first."
    )


def end_worker(sentence: str) -> None:
    """Ends the process at once, in whatever thread: what it would write is another's now."""
    end_process(sentence, ExitCode.CONFIG)


def _printable(text: str) -> str:
    return "".join(character for character in text[:100] if character.isprintable())


def _machine() -> str:
    """The identity of this boot and container; "": not known."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: str) -> str:
    """The start of a process, in ticks since the boot; "" if there is none, or only what is left of it."""
    try:
        status = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()
        return "" if status[0] in "ZX" else status[19]
    except (OSError, IndexError, ValueError):
        return ""
