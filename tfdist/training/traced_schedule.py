"""A schedule in which the traced steps are calls of their own, so that each is one step of the trace."""

from __future__ import annotations

from dataclasses import dataclass

from tfdist.training.loop import LoopSchedule


@dataclass(frozen=True)
class TracedSchedule(LoopSchedule):
    """From step `traced[0]` to `traced[1]` every step is a boundary. All workers must have the same."""

    traced: tuple[int, int] | None = None

    def next_boundary(self, step: int, step_s: float = 0.0) -> int:
        boundary = super().next_boundary(step, step_s)
        if self.traced is None or step >= self.traced[1]:
            return boundary
        return min(boundary, max(step + 1, self.traced[0]))
