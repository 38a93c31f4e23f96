"""The chief's standard output: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

from tfdist.control.amounts_text import clock_time
from tfdist.control.terminal import without_control
from tfdist.telemetry.events import Event, Observer

_NOT_METRICS = ("train/learning_rate", "train/gradient_norm", "train/loss_scale", "train/skipped_steps")

EpochAt = Callable[[int], float | None]  # step -> passes over the data by then; None: unknown


class PlainConsole(Observer):
    """Prints a line per event."""

    def __init__(self, total_steps: int, epoch_at: EpochAt):
        self.total_steps, self.epoch_at = total_steps, epoch_at
        self._evaluated: int | None = None  # samples in an evaluation; None: unknown
        self._weighted = False  # whether the evaluation samples have weights

    def __call__(self, event: Event) -> None:
        line = self.line(event)
        if line:
            print(without_control(line), flush=True)

    def line(self, event: Event) -> str:
        """Returns the event as a line; "" if it has nothing to show."""
        values = event.values
        if event.kind == "start":
            self._evaluated, self._weighted = values.get("evaluated_samples"), bool(values.get("eval_weighted"))
        if event.kind == "train":
            return " | ".join([f"step {event.step}/{self.total_steps}", *self.train_parts(event)])
        if event.kind == "eval":
            numbers = "  ".join(
                f"{name.removeprefix('eval/')} {value:.4g}" for name, value in values.items() if name != "eval/samples"
            )
            return f"evaluation at step {event.step}: {numbers}  ({self._size(float(values.get('eval/samples', 0)))})"
        if event.kind == "warning":
            return f"WARNING at step {event.step}: {values.get('message', '')}"
        return f"{event.kind}: {values['message']}" if values.get("message") else ""

    def _size(self, weight: float) -> str:
        """The size of an evaluation as text. weight: the sum of its weights: the number of samples if each is 1."""
        if weight == self._evaluated or (self._evaluated is None and not self._weighted and weight.is_integer()):
            return f"{weight:,.0f} samples"
        return f"weight {weight:,.0f}" if weight >= 1000 or weight.is_integer() else f"weight {weight:.4g}"

    def train_parts(self, event: Event) -> list[str]:
        """Returns the parts of a train line for which there are values."""
        values, parts = event.values, []
        if (epoch := self.epoch_at(event.step)) is not None:
            parts.append(f"epoch {epoch:.2f}")
        parts += [
            f"{name.removeprefix('train/')} {_number(value)}"
            for name, value in values.items()
            if name.startswith("train/") and name not in _NOT_METRICS
        ]
        if "train/learning_rate" in values:
            parts.append(f"lr {values['train/learning_rate']:.1e}")
        if values.get("train/skipped_steps"):
            parts.append(
                f"skipped {values['train/skipped_steps']} steps, loss scale {values.get('train/loss_scale', 1.0):g}"
            )
        if "perf/samples_per_s" in values:
            parts.append(f"{values['perf/samples_per_s']:,.0f} samples/s")
        speed = values.get("perf/steps_per_s", 0.0)
        if speed > 0 and math.isfinite(speed):
            parts.append(f"eta {clock_time(max(self.total_steps - event.step, 0) / speed)}")
        return parts


class BarConsole(PlainConsole):
    """The console on a terminal: train events move a bar, other events are lines above it."""

    def __init__(self, total_steps: int, epoch_at: EpochAt):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        super().__init__(total_steps, epoch_at)
        # Standard error is not redirected if it is a file: errors must not end up on standard output.
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
            refresh_per_second=4,
            redirect_stderr=sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("", total=total_steps, numbers="")
        self._bar.start()
        self._bar.console.show_cursor(True)  # a process that ends abruptly would leave it hidden

    def __call__(self, event: Event) -> None:
        if event.kind == "train":
            self._bar.update(self._task, completed=event.step, numbers=" | ".join(self.train_parts(event)))
            return
        if event.kind in ("start", "restore"):  # a resumed run does not begin at 0
            self._bar.update(self._task, completed=event.step)
        if line := self.line(event):
            self._bar.console.print(without_control(line), markup=False, highlight=False)

    def close(self) -> None:
        self._bar.stop()


def make_console(progress: str, total_steps: int, epoch_at: EpochAt) -> PlainConsole | None:
    """Returns the console of --progress; None for "none"."""
    if progress == "none":
        return None
    bar = progress == "bar" or (progress == "auto" and sys.stdout.isatty())
    return (BarConsole if bar else PlainConsole)(total_steps, epoch_at)


def _number(value: float) -> str:
    """Formats with four decimals, or with an exponent where those would show nothing or too much."""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 or not math.isfinite(value) else f"{value:.3e}"
