"""What happened since the last log line, as the values of a "train" event."""

from __future__ import annotations

import math

from tfdist.telemetry.events import Event
from tfdist.telemetry.timer import Clock
from tfdist.training.step import StepOutput


class Interval:
    """Adds up step outputs; `event` ends the interval and starts the next."""

    def __init__(self, clock: Clock, global_batch: int):
        self.clock, self.global_batch = clock, global_batch
        self._reset()

    def _reset(self) -> None:
        self.steps, self.weight, self.skipped = 0, 0.0, 0
        self.sums: dict[str, float] = {}
        self.seconds = self.clock.seconds

    def add(self, out: StepOutput, n: int) -> None:
        self.steps += n
        self.weight += out.weight
        self.skipped += out.skipped
        for name, mean in out.means.items():
            self.sums[name] = self.sums.get(name, 0.0) + mean * out.weight
        self.last = out

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
            "data/consumed_samples": step * self.global_batch,
        }
        self._reset()
        return Event("train", step, values)
