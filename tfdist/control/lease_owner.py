"""The owner of a lease (lease.py, storage/store_lease.py), whether that process is still alive, and when another may
take the lease over."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tfdist.control.exit_codes import ConfigError, ExitCode, end_process
from tfdist.control.terminal import say

_given_back: set[str] = set()  # ids of this process's owners


@dataclass(frozen=True)
class Owner:
    """The process that holds a lease. All fields are text, so that a lease of any version can be shown."""

    host: str
    pid: str
    since: str
    job: str  # see lease.job_identity; "": unknown
    machine: str  # differs between boots and containers: process ids can be compared only within one
    started: str  # start time of the process, in the kernel's ticks
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
        """Reads the owner from a lease's text; None if the text is not a lease."""
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            found = json.loads(text)
            return cls(**{field.name: str(found[field.name]) for field in fields(cls)})
        return None

    def lease(self) -> str:
        """Returns the text of this owner's lease, renewed now."""
        renewed = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return json.dumps({**asdict(self), "renewed": renewed}, indent=1)

    def describe(self) -> str:
        return f"process {_printable(self.pid)} on {_printable(self.host)}, since {_printable(self.since)}"

    def is_here(self) -> bool:
        """Returns whether the owner runs, or ran, on this machine."""
        return bool(self.machine) and self.machine == _machine()

    def runs_here(self) -> bool:
        """Returns whether an owner on this machine is still running, and has not given its lease back."""
        return bool(self.started) and _started(self.pid) == self.started and self.id not in _given_back

    def give_back(self) -> None:
        """Notes that this process, which may live on, has given the owner's lease back: it may have been unable to
        remove it."""
        _given_back.add(self.id)


@dataclass(frozen=True)
class Patience:
    """How long to wait for an owner, in seconds of the observer's clock."""

    dead: float  # without a renewal, until the owner counts as dead
    damaged: float  # for a lease that cannot be read: it may be being written
    to_end: float = 5.0  # for an owner on the same machine to end: it may have been killed a moment ago


class Watched:
    """Another owner's lease, observed repeatedly by a process that wants it.

    place: where the lease is stored. name: the user's name for the folder. mine: the process that wants it.
    """

    def __init__(self, place: str, name: str, mine: Owner, patience: Patience):
        self._place, self._name, self._mine, self._patience = place, name, mine, patience
        self._begun = self._changed = time.monotonic()
        self._seen, self._renewed, self._said = "", False, False

    def is_free(self, text: str) -> bool:
        """Returns whether the lease may be taken over. text: its current text. Raises ConfigError if its owner is
        alive."""
        now, owner = time.monotonic(), Owner.read(text)
        if text != self._seen:
            self._renewed = owner is not None and owner == Owner.read(self._seen)
            self._seen, self._changed = text, now
        unchanged = now - self._changed
        if owner is None:
            return unchanged > self._patience.damaged
        same_job, here = bool(owner.job) and owner.job == self._mine.job, owner.is_here()
        is_over = not owner.runs_here() if here else same_job
        if is_over:
            return True
        if here and now - self._begun <= self._patience.to_end:
            return False
        if self._renewed or (here and not same_job):
            raise in_use(self._name, owner)
        if unchanged > self._patience.dead:  # also a process here that lives, but is not the chief any more
            return True
        self._say_once(owner)
        return False

    def _say_once(self, owner: Owner) -> None:
        if not self._said:
            self._said = True
            say(
                f"{self._place} names {owner.describe()}; checking for at most {self._patience.dead:g} s whether it is"
                " still alive."
            )


def in_use(name: str, owner: Owner) -> ConfigError:
    """Returns the error for a second job in the same folder."""
    return ConfigError(
        f"{name} is in use by another job ({owner.describe()}): choose another folder, or end that job first."
    )


def end_worker(sentence: str) -> None:
    """Ends the process at once, from any thread: the folder now belongs to another job."""
    end_process(sentence, ExitCode.CONFIG)


def end_attempt(sentence: str) -> None:
    """The same where the folder now belongs to a later attempt of this job, which the other workers are to join."""
    end_process(sentence, ExitCode.PEER_LOST)


def ending(owner: Owner | None, job: str) -> Callable[[str], None]:
    """Returns what ends a process of a job when `owner` has taken its folder over. None: it is not known who has."""
    return end_attempt if owner is not None and job and owner.job == job else end_worker


def _printable(text: str) -> str:
    return "".join(character for character in text[:100] if character.isprintable())


def _machine() -> str:
    """Returns the identity of this boot and container; "" if not known."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: str) -> str:
    """Returns the start time of a process, in ticks since boot; "" if there is no such process, or only a zombie."""
    try:
        status = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()
        return "" if status[0] in "ZX" else status[19]
    except (OSError, IndexError, ValueError):
        return ""
