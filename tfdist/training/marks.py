"""A rhythm with boundaries at given steps beside the periodic ones: where traces begin and end."""

from __future__ import annotations

from dataclasses import dataclass

from tfdist.training.loop import Rhythm


@dataclass(frozen=True)
class MarkedRhythm(Rhythm):
    """Stops also at `marks` (steps), which must be the same on all workers."""

    marks: tuple[int, ...] = ()

    def next_boundary(self, step: int, step_s: float = 0.0) -> int:
        return min([super().next_boundary(step, step_s), *(mark for mark in self.marks if mark > step)])
