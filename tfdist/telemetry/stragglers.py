"""Finds workers that are persistently slower than the others, from the seconds that each one computes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

_PATIENCE = 5  # intervals in a row: a single one may be a page fault or a noisy neighbor


class Stragglers:
    """A rank is a straggler if it takes `factor` times the median of the others for several intervals in a row."""

    def __init__(self, factor: float, patience: int = _PATIENCE):
        self.factor, self.patience = factor, patience
        self._slow_for: dict[int, int] = {}
        self.named: set[int] = set()

    def add(self, seconds: Sequence[float]) -> list[str]:
        """Adds one interval: compute seconds by rank.

        Returns sentences about ranks that became stragglers, or are no longer stragglers.
        """
        if self.factor <= 0 or len(seconds) < 2 or min(seconds) <= 0:
            return []
        sentences = []
        for rank, own_seconds in enumerate(seconds):
            others = statistics.median(value for other, value in enumerate(seconds) if other != rank)
            slow = own_seconds > self.factor * others
            self._slow_for[rank] = self._slow_for.get(rank, 0) + 1 if slow else 0
            if self._slow_for[rank] >= self.patience and rank not in self.named:
                self.named.add(rank)
                sentences.append(
                    f"rank {rank} is a straggler: it computes {own_seconds / others:.1f} times as long as the others,"
                    " and all wait for it. Look at its machine: clock, other processes, data source. (If steps are"
                    " data-bound, it may be no slower than the others: the last one to get its batch is named.)"
                )
            elif not slow and rank in self.named:
                self.named.remove(rank)
                sentences.append(f"rank {rank} is no longer a straggler.")
        return sentences
