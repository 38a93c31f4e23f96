"""Decides when to save, and what to keep. Pure decisions: no files, no clock of their own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence


class TimePolicy:
    """Saves every `minutes`, by a clock that only the chief reads. 0: never."""

    def __init__(self, minutes: float, now: Callable[[], float] = time.monotonic):
        self.seconds, self._now = minutes * 60, now
        self._last = now()

    def due(self) -> bool:
        return self.seconds > 0 and self._now() - self._last >= self.seconds

    def saved(self) -> None:
        """Starts the next interval."""
        self._last = self._now()


class ScheduledSteps:
    """Tells whether an uninterrupted run would also save at a step: at multiples of `periods`, but not where a job was
    asked to end. Without periods always True, since there is nothing to tell by.
    """

    def __init__(self, *periods: int):
        self.periods = [period for period in periods if period]

    def __call__(self, step: int) -> bool:
        return not self.periods or any(step % period == 0 for period in self.periods)


ALL_STEPS = ScheduledSteps()


class Retention:
    """Keeps the newest `keep` snapshots, each one whose step is a multiple of `every` forever, the best one by a
    metric, and the newest one of a scheduled step.

    best: "min:loss" or "max:accuracy"; "" for none.
    """

    def __init__(self, keep: int, every: int = 0, best: str = "", scheduled: ScheduledSteps = ALL_STEPS):
        self.keep, self.every, self.scheduled = keep, every, scheduled
        self.order, _, self.metric = best.partition(":")

    def to_delete(self, steps: Iterable[int], metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
        """Returns those of `steps` to delete; never the newest. metrics: step -> evaluation metrics, where known."""
        steps = sorted(steps)
        kept = {*steps[-self.keep :], *[step for step in steps if self.scheduled(step)][-1:]}
        kept |= self.kept_for_ever(steps, metrics)
        return [step for step in steps if step not in kept]

    def kept_for_ever(self, steps: Sequence[int], metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
        """Returns those of `steps` to keep however many newer ones there are, and wherever the run goes back to."""
        kept = {step for step in steps if self.every and step % self.every == 0}
        scored = {
            step: metrics[step][self.metric] for step in steps if self.metric and self.metric in metrics.get(step, {})
        }
        scored = {step: score for step, score in scored.items() if math.isfinite(score)}  # NaN is no best
        if scored:
            kept.add((min if self.order == "min" else max)(scored, key=lambda step: (scored[step], step)))
        return kept
