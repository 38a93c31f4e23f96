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
ANY = frozenset(ExitCode) - {ExitCode.INTERNAL}  # where the change may have left something valid


@dataclass(frozen=True)
class Process:
    """One command, `train --steps=3`, and what it finds in its environment. "{port0}" and "{port1}" are ports that are
    free, "{busy}" is one that is not."""

    arguments: tuple[str, ...]  # the command first: a module of tfdist
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Mistake:
    """Processes in a folder of their own.

    codes: how one of them must end; the others may have lost it. words: one of them is in its sentence, if there are
    any.
    files: path -> text, over those of every case (modules.py). prepared: folders that are there (prepared.py).
    damage: what is done to files before (damage.py). plain: the processes run a Keras script, in which what one process
    alone fails with may also be the end of several.
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
        """In one line, for people; without what is `usual`: arguments, and lines of files."""
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
    """A mistake of one process."""
    return Mistake(kind, (Process(tuple(arguments), environment or {}),), codes, words, **fields)
