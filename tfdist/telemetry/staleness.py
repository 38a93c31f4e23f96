"""The age of the weights for which gradients were computed: a histogram of staleness, and its values for events.

The staleness of an update is the number of other updates between reading the weights and changing them.
"""

from __future__ import annotations

from collections import Counter

_LARGEST_EXACT = 7  # above it, buckets double: 8-15, 16-31, ...


class Staleness:
    """Counts updates by staleness, and gradients dropped because of it."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.dropped = 0

    def add(self, staleness: int, applied: bool) -> None:
        if applied:
            self.counts[staleness] += 1
        else:
            self.dropped += 1

    def merge(self, other: Staleness) -> None:
        self.counts.update(other.counts)
        self.dropped += other.dropped

    def values(self) -> dict[str, float]:
        """Returns staleness/mean, staleness/max, staleness/dropped, and the updates per bucket: staleness/0,
        staleness/1, ..., staleness/8-15.
        """
        updates = self.counts.total()
        result: dict[str, float] = {"staleness/dropped": self.dropped}
        if updates:
            result["staleness/mean"] = sum(staleness * count for staleness, count in self.counts.items()) / updates
            result["staleness/max"] = max(self.counts)
        for staleness, count in sorted(self.counts.items()):
            name = f"staleness/{_bucket(staleness)}"
            result[name] = result.get(name, 0) + count
        return result


def _bucket(staleness: int) -> str:
    if staleness <= _LARGEST_EXACT:
        return str(staleness)
    low = 1 << (staleness.bit_length() - 1)
    return f"{low}-{2 * low - 1}"
