"""The finding of a check: all is fine, or what is wrong and how to fix it, in one line."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from typing import Any


class State(enum.Enum):
    """The severity of a finding. Only WRONG makes the machine unfit."""

    FINE = "fine"
    WARNING = "warning"
    WRONG = "WRONG"


@dataclasses.dataclass(frozen=True)
class Finding:
    """The finding of a check. what: the observation; fix: what the user can do; empty if the finding is fine."""

    name: str
    state: State
    what: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.state.value:7s}  {self.name}: {self.what}{f' Fix: {self.fix}' if self.fix else ''}"

    def as_dict(self) -> dict[str, str]:
        return {**dataclasses.asdict(self), "state": self.state.name}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Finding:
        """Raises KeyError if `fields` do not describe a finding."""
        return cls(str(fields["name"]), State[fields["state"]], str(fields["what"]), str(fields.get("fix", "")))


def fine(name: str, what: str) -> Finding:
    return Finding(name, State.FINE, what)


def warning(name: str, what: str, fix: str) -> Finding:
    return Finding(name, State.WARNING, what, fix)


def wrong(name: str, what: str, fix: str) -> Finding:
    return Finding(name, State.WRONG, what, fix)


def is_healthy(findings: Iterable[Finding]) -> bool:
    return all(finding.state is not State.WRONG for finding in findings)
