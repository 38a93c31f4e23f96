"""How long to wait before another try."""

from __future__ import annotations

_MOST_DOUBLINGS = 60  # more would overflow a float after some hundred tries


def wait_seconds(failures: int, longest: float, first: float = 1.0) -> float:
    """The wait after so many failures in a row: none after 0, `first` after one, then twice as long each time, up to
    `longest` seconds."""
    return min(longest, first * 2.0 ** min(failures - 1, _MOST_DOUBLINGS)) if failures else 0.0
