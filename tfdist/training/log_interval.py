"""The events of a log interval: "train", and those that tell how time was spent: "phases", "verdict", stragglers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.control.exit_codes import DivergedError
from tfdist.telemetry import phases
from tfdist.telemetry.events import Event
from tfdist.telemetry.phases import PhaseMeter
from tfdist.telemetry.rates import Rates
from tfdist.telemetry.stragglers import Stragglers
from tfdist.telemetry.timer import Clock
from tfdist.telemetry.verdict import Verdicts
from tfdist.training.model_rates import memory
from tfdist.training.step_output import StepOutput

_SELDOM = "regularization"  # a sum that exists only if it is not 0
_MOST_SKIPPED = 50  # steps in a row: the search for the loss scale of float16 takes up to 30


class IntervalSums:
    """The sums of an interval so far. Snapshots contain them: a run that resumes in the middle of an interval shows
    means over the whole interval.

    weight: of the samples, or tokens; skipped: number of skipped steps; sums: loss and metrics times weight.
    """

    def __init__(self) -> None:
        self.restore({})

    def restore(self, fields: Mapping[str, Any]) -> None:
        """Continues from the result of `fields`; starts from nothing if that is empty."""
        self.steps, self.weight = int(fields.get("steps", 0)), float(fields.get("weight", 0.0))
        self.skipped, self.sums = int(fields.get("skipped", 0)), dict[str, float](fields.get("sums", {}))

    def fields(self) -> dict[str, Any]:
        """Returns the state, for JSON."""
        return {"steps": self.steps, "weight": self.weight, "skipped": self.skipped, "sums": dict(self.sums)}

    def add(self, out: StepOutput, n: int) -> None:
        """Adds the output of a call of n steps."""
        if self.sums and {*self.sums, _SELDOM} != {*out.sums, _SELDOM}:  # they are sums of another objective
            self.restore({})
        self.steps += n
        self.weight += out.weight
        self.skipped += out.skipped
        for name, value in out.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def means(self) -> dict[str, float]:
        """Returns means of loss and metrics; NaN if all steps were skipped, 0 if no sample had a weight."""
        of_nothing = math.nan if self.skipped == self.steps else 0.0
        return {name: total / self.weight if self.weight else of_nothing for name, total in self.sums.items()}


class Interval:
    """Adds up step outputs; `events` ends the interval and starts the next. sums: the sums with which it begins.

    Raises DivergedError if too many steps in a row are skipped, or all steps of the run.
    """

    def __init__(
        self,
        clock: Clock,
        global_batch: int,
        position: Callable[[int], int],
        rates: Rates | None,
        watch: Watch | None,
        sums: IntervalSums | None = None,
    ):
        self.sums = sums or IntervalSums()
        self.clock, self.global_batch, self.position = clock, global_batch, position
        self.rates, self.watch = rates or Rates(), watch
        if watch:
            watch.forget()
        self._skipped_in_a_row = 0
        self._has_warned_of_no_weight = False
        self._begin()

    def _begin(self) -> None:
        self.steps = 0  # by this process
        self.compute_s: list[np.ndarray] = []
        self.news: list[str] = []
        self.seconds, self.pauses = self.clock.seconds, dict(self.clock.pauses)

    def add(self, out: StepOutput, n: int, last: bool = False) -> None:
        """Adds the output of a call of n steps. last: whether the run ends with it."""
        self._skipped_in_a_row = self._skipped_in_a_row + n if out.skipped == n else 0
        if self._skipped_in_a_row >= _MOST_SKIPPED or (last and self._skipped_in_a_row == out.step):
            scale = ", lower --loss_scale_initial" if out.loss_scale > 1.0 else ""
            raise DivergedError(
                f"Loss or gradients were NaN or infinite in each of the last {self._skipped_in_a_row} steps up to step"
                f" {out.step}, so all of them were skipped and nothing was learned: look for NaN in the data, and"
                f" negative weights of an --objective, lower --learning_rate{scale}, or set --clip_norm."
            )
        self.steps += n
        self.sums.add(out, n)
        self.news += out.news
        if out.step_s:  # belongs to the previous call
            self.compute_s.append(out.compute_s)
        if self.watch:
            self.watch.add(out)
        self.last = out

    def compute_by_rank(self) -> list[float]:
        """Returns each worker's compute seconds per step, as means over the calls; [] if not known yet."""
        return np.mean(self.compute_s, axis=0).tolist() if self.compute_s else []

    def events(self, step: int, extra_values: Mapping[str, float]) -> list[Event]:
        """Returns the events of a log line, the "train" event last. A collective call if a call was sampled.

        extra_values: further values for the train event.
        """
        watched = [Event("warning", step, {"message": sentence}) for sentence in self.news]
        watched += self.watch.events(step, self.compute_by_rank()) if self.watch else ()
        if self.sums.skipped == self.sums.steps:
            message = (
                f"All of the last {self.sums.steps} steps were skipped, because loss or gradients were not finite:"
                " there is no loss to show."
            )
            watched.append(Event("warning", step, {"message": message}))
        elif not self.sums.weight and not self._has_warned_of_no_weight:
            self._has_warned_of_no_weight = True
            message = (
                "All samples since the last log line have weight 0: nothing was learned from them, and their loss is"
                " shown as 0, as in Keras' fit."
            )
            watched.append(Event("warning", step, {"message": message}))
        return [*watched, self.event(step, extra_values)]

    def event(self, step: int, extra_values: Mapping[str, float]) -> Event:
        seconds = max(self.clock.seconds - self.seconds, 1e-9)
        values = {f"train/{name}": mean for name, mean in self.sums.means().items()}
        values |= {
            **extra_values,
            "train/gradient_norm": self.last.gradient_norm,
            "train/loss_scale": self.last.loss_scale,
            "train/skipped_steps": self.sums.skipped,
            "perf/steps_per_s": self.steps / seconds,
            "perf/samples_per_s": self.steps * self.global_batch / seconds,
            "data/consumed_samples": self.position(step),
            **self.rates.values(self.steps * self.global_batch / seconds, self.position(step)),
            **memory(),
        }
        values |= {
            f"pause/{name}_s": seconds - self.pauses.get(name, 0.0)
            for name, seconds in self.clock.pauses.items()
            if seconds > self.pauses.get(name, 0.0)
        }
        seconds_by_rank = self.compute_by_rank()
        if len(seconds_by_rank) > 1 and max(seconds_by_rank) > 0:
            values |= {
                "perf/compute_s": statistics.median(seconds_by_rank),
                "perf/slowest_compute_s": max(seconds_by_rank),
                "perf/slowest_rank": int(np.argmax(seconds_by_rank)),
            }
        self.sums.restore({})
        self._begin()
        return Event("train", step, values)


class Watch:
    """Follows how the workers spend their time, over the log intervals of a run.

    Args:
      rank: of this worker.
      gather: this worker's float64 array -> the arrays of all workers, stacked; a collective call.
      split: whether forward and backward pass can be told apart.
      straggler_factor: see stragglers.py.
    """

    def __init__(
        self,
        clock: Clock,
        rank: int,
        gather: Callable[[np.ndarray], np.ndarray],
        split: bool = True,
        straggler_factor: float = 0.0,
    ):
        self.rank, self.gather, self.split = rank, gather, split
        self.meter, self.verdicts, self.stragglers = PhaseMeter(clock), Verdicts(), Stragglers(straggler_factor)
        self._first: int | None = None  # the step from which the meter counts
        self._skip = True

    def forget(self) -> None:
        """Restarts the measurement. The next call, which traces or follows a rollback, does not count, nor does the
        time after it, up to the following call."""
        self._first, self._skip = None, True

    def add(self, out: StepOutput) -> None:
        if self._skip or not out.call:
            self._skip = False
            return
        if self._first is None:
            self.meter.begin(out.call.wall_s)
            self._first = out.step - out.call.steps
        self.meter.add(out.call)

    def events(self, step: int, compute_by_rank: Sequence[float]) -> Iterator[Event]:
        """Yields the events of a log line, on all workers: stragglers, and the phases if a call was sampled since the
        last log line."""
        for sentence in self.stragglers.add(compute_by_rank):
            yield Event("warning", step, {"message": sentence})
        seconds = self.meter.seconds()
        if seconds is None or self._first is None:
            return
        steps, first, overlap_s = step - self._first, self._first, self.meter.overlap_s
        self._first = step
        self.meter.begin()  # the time that reporting takes belongs to the next interval
        yield Event("phases", step, phases.values(seconds, overlap_s, self.split) | {"phase_steps": steps})
        sentence = self.verdicts.add(first, steps, self.gather(seconds))
        if sentence and self.rank == 0:
            yield Event("verdict", step, {"message": sentence})
