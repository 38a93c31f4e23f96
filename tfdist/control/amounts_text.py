"""Formats times, bytes and counts as text for readers."""

from __future__ import annotations

import math


def long_time(seconds: float) -> str:
    """ "37.2 s", "5:07 min", "3:05:07 h"."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d} min" if whole < 3600 else f"{clock_time(whole)} h"


def short_time(seconds: float) -> str:
    """A short time with its unit: "3.4 ms", "1.25 s"."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def clock_time(seconds: float) -> str:
    """A time as a clock shows it, "0:03:20"; fractions of a second are cut off."""
    return f"{int(seconds // 3600)}:{int(seconds // 60 % 60):02d}:{int(seconds % 60):02d}"


def with_prefix(value: float) -> str:
    """ "208 M", "1.25 T": three digits, with the prefix that leaves the fewest digits before the point; "" for 0."""
    if not value:
        return ""
    exponent = min(5, max(0, int(math.floor(math.log10(abs(float(f"{value:.3g}"))) / 3))))
    return f"{value / 1000**exponent:,.3g} {('', 'k', 'M', 'G', 'T', 'P')[exponent]}".strip()


def bytes_with_unit(size: float) -> str:
    """ "207 B", "1.54 kB", "4.2 TB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def counted(number: int, word: str) -> str:
    """A number with its word: "1 restart", "2 restarts"."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"
