"""Requests of workers to each other while they train."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Requests:
    """The requests of a worker; summed over workers in the reduction that is there anyway."""

    save: bool = False
    stop: bool = False
    leave: bool = False  # end this group of workers, to form another


REQUESTS = tuple(field.name for field in fields(Requests))
NOTHING = Requests()
