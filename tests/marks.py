"""Which cases of a test belong to the fast part of the suite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """The cases of a test (a tuple: its several arguments): `fast` as they are, all others marked as slow."""
    cases = list(cases)
    assert all(case in cases for case in fast), f"not all of {fast} are cases of the test"
    return [case if case in fast else _slow(*(case if isinstance(case, tuple) else (case,))) for case in cases]


def _slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)
