"""Marks which cases of a test belong to which part of the suite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """Returns the cases of a test (a tuple: several arguments): `fast` as they are, all others marked as slow."""
    return _marked_but(pytest.mark.slow, cases, fast)


def thorough_but(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Returns the cases of a test: `kept` belong to the default suite, all others are marked as thorough."""
    return _marked_but(pytest.mark.thorough, cases, kept)


def _marked_but(mark: pytest.MarkDecorator, cases: Iterable[Any], unmarked: tuple[Any, ...]) -> list[Any]:
    cases = sorted(cases) if isinstance(cases, set) else list(cases)  # all processes of pytest need one order
    assert all(case in cases for case in unmarked), f"not all of {unmarked} are cases of the test"
    return [
        case if case in unmarked else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
        for case in cases
    ]
