"""A mistake: what a user starts, from which files, and how it must end."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from tfdist.control.exit_codes import ExitCode

CONFIG, CLUSTER, DATA, STARTUP = (
    frozenset({code}) for code in (ExitCode.CONFIG, ExitCode.CLUSTER, ExitCode.DATA, ExitCode.STARTUP)
)
CHECKPOINT, DIVERGED, UNSUPPORTED = (
    frozenset({code}) for code in (ExitCode.CHECKPOINT, ExitCode.DIVERGED, ExitCode.UNSUPPORTED)
)
OK = frozenset({ExitCode.OK})
ANY = frozenset(ExitCode) - {ExitCode.INTERNAL}  # if the change may have left something valid


@dataclass(frozen=True)
class Process:
    """One command, such as `train --steps=3`, and the variables of its environment. "{port0}" to "{port2}" are free
    ports, "{busy}" is a port in use."""

    arguments: tuple[str, ...]  # the command first: a module of tfdist
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Mistake:
    """Processes in a folder of their own.

    codes: how one process must end; the others may have ended because they lost it. words: if any are given, one of
    them must be in the sentence of that process.
    files: path -> text, in addition to or instead of those of every case (modules.py). prepared: folders that exist
    (prepared.py). damage: what is done to files before the start (damage.py). plain: the processes run a Keras script;
    several of them may end with the error with which one process alone ends.
    """

    kind: str
    processes: tuple[Process, ...]
    codes: frozenset[int]
    words: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    prepared: tuple[str, ...] = ()
    damage: tuple[tuple[Any, ...], ...] = ()
    plain: bool = False

    @property
    def surely_wrong(self) -> bool:
        return ExitCode.OK not in self.codes

    def describe(self, usual: Collection[str] = ()) -> str:
        """Returns one line for people, without `usual` arguments and lines of files."""
        parts = [
            " ".join([process.arguments[0], *(argument for argument in process.arguments[1:] if argument not in usual)])
            + "".join(f" {name}={value}" for name, value in process.environment.items())
            for process in self.processes
        ]
        files = [
            f"{name}: " + "; ".join(line.strip() for line in text.splitlines() if line not in usual)
            for name, text in self.files.items()
        ]
        return ascii(" | ".join([*parts, *files, *map(str, self.damage)]))[1:700]

    def of(self, **changes: Any) -> Mistake:
        return dataclasses.replace(self, **changes)


def one(
    kind: str,
    arguments: list[str] | tuple[str, ...],
    codes: frozenset[int],
    *words: str,
    environment: Mapping[str, str] | None = None,
    **fields: Any,
) -> Mistake:
    """Returns a mistake of one process."""
    return Mistake(kind, (Process(tuple(arguments), environment or {}),), codes, words, **fields)
