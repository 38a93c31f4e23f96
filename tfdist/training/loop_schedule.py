"""When, in steps, the loop does what: log lines, evaluations, snapshots, backups, traced steps."""

from __future__ import annotations

from dataclasses import dataclass

# Both bound how long a request to save or stop waits.
_MOST_STEPS_PER_CALL = 100
_MOST_SECONDS_PER_CALL = 5.0


@dataclass(frozen=True)
class LoopSchedule:
    """Periods in steps; 0 or less: never. All workers must have the same."""

    target: int
    log_every: int
    eval_every: int
    save_every: int
    backup_every: int = 0
    steps_per_loop: int = 0
    save_at_evaluation: bool = False  # so that the best by a metric can be kept
    traced: tuple[int, int] | None = None  # steps (first, last) between which each is a call, so one step of the trace

    def next_boundary(self, step: int, step_s: float = 0.0) -> int:
        """The first step after `step` at which something is due.

        `step_s`: seconds per step, the same on all workers; 0: unknown.
        """
        affordable = max(1, int(_MOST_SECONDS_PER_CALL / step_s)) if step_s else _MOST_STEPS_PER_CALL
        most = step + (self.steps_per_loop or min(_MOST_STEPS_PER_CALL, affordable))
        boundary = min([self.next_settled(step), most, *_next_multiples(step, self.log_every)])
        if self.traced is None or step >= self.traced[1]:
            return boundary
        return min(boundary, max(step + 1, self.traced[0]))

    def next_settled(self, step: int) -> int:
        """The first step after `step` at which the state is used: for an evaluation, a snapshot, at the end.

        Steps up to there may be under way at the same time, those after it may not yet.
        """
        return min([self.target, *_next_multiples(step, self.eval_every, self.save_every, self.backup_every)])

    def due(self, period: int, before: int, step: int) -> bool:
        """Whether a multiple of `period` lies in (before, step]."""
        return period > 0 and step // period > before // period


def _next_multiples(step: int, *periods: int) -> list[int]:
    return [(step // period + 1) * period for period in periods if period > 0]
