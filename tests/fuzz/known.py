"""Differences whose causes are known but not fixed yet: such cases are not drawn, so that other differences are seen.

Remove a line when its cause is fixed; --with_known draws them all.
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
    """Returns the known difference that a case would show; "" if none."""
    return next((name for name, shows in KNOWN.items() if shows(case)), "")
