"""Differences that were found, whose causes are known and not mended yet: such cases are not drawn, so that others are
seen.

Remove a line when its cause is mended; --with_known draws them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.fuzz import space

Case = Mapping[str, Any]


def _blocks(case: Case) -> set[str]:
    return set(space.flat_blocks(case))


KNOWN: dict[str, Callable[[Case], bool]] = {}


def why(case: Case) -> str:
    """Which known difference a case would show; "" for none."""
    return next((name for name, shows in KNOWN.items() if shows(case)), "")
