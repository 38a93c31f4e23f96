"""What happened since the last log line, as the values of a "train" event."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import numpy as np

from tfdist.telemetry.events import Event
from tfdist.telemetry.timer import Clock
from tfdist.training.step import StepOutput


class Interval:
    """Adds up step outputs; `event` ends the interval and starts the next."""

    def __init__(self, clock: Clock, global_batch: int, position: Callable[[int], int]):
        self.clock, self.global_batch, self.position = clock, global_batch, position
        self._reset()

    def _reset(self) -> None:
        self.steps, self.weight, self.skipped = 0, 0.0, 0
        self.sums: dict[str, float] = {}
        self.compute_s: list[np.ndarray] = []
        self.seconds, self.pauses = self.clock.seconds, dict(self.clock.pauses)

    def add(self, out: StepOutput, n: int) -> None:
        self.steps += n
        self.weight += out.weight
        self.skipped += out.skipped
        for name, value in out.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        if out.step_s:  # of the call before
            self.compute_s.append(out.compute_s)
        self.last = out

    def compute_by_rank(self) -> list[float]:
        """Seconds per step that each worker computed, means over the calls; [] if not known yet."""
        return np.mean(self.compute_s, axis=0).tolist() if self.compute_s else []

    def event(self, step: int, learning_rate: float) -> Event:
        seconds = max(self.clock.seconds - self.seconds, 1e-9)
        values = {f"train/{name}": total / self.weight if self.weight else math.nan for name, total in self.sums.items()}
        values |= {
            "train/learning_rate": learning_rate,
            "train/gradient_norm": self.last.gradient_norm,
            "train/loss_scale": self.last.loss_scale,
            "train/skipped_steps": self.skipped,
            "perf/steps_per_s": self.steps / seconds,
            "perf/samples_per_s": self.steps * self.global_batch / seconds,
            "data/consumed_samples": self.position(step),
        }
        values |= {f"pause/{name}_s": seconds - self.pauses.get(name, 0.0) for name, seconds in self.clock.pauses.items() if seconds > self.pauses.get(name, 0.0)}
        seconds_by_rank = self.compute_by_rank()
        if len(seconds_by_rank) > 1 and max(seconds_by_rank) > 0:
            values |= {"perf/compute_s": statistics.median(seconds_by_rank), "perf/slowest_compute_s": max(seconds_by_rank), "perf/slowest_rank": int(np.argmax(seconds_by_rank))}
        self._reset()
        return Event("train", step, values)
