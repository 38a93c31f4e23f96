"""What workers ask of each other while they train."""

from __future__ import annotations

from typing import NamedTuple


class Requests(NamedTuple):
    """What a worker may ask for; summed over workers in the reduction that is there anyway."""

    save: bool = False
    stop: bool = False
    leave: bool = False  # end this group of workers, to form another


SIGNALS = Requests._fields
NOTHING = Requests()
