"""What a call of the step gives back, and the vectors as which it travels, in which every number has a name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tfdist.telemetry.phases import Call
from tfdist.training.requests import SIGNALS, Requests

FIRST_SUMS = ("loss", "weight", "regularization")  # over samples, before those of the metrics
_HEAD = ("gradient_norm", "loss_scale", "skipped", "bad", "compute_s")


class StepOutput(NamedTuple):
    """Results of n steps, the same on every worker."""

    step: int  # the counter after them
    means: dict[
        str, float
    ]  # loss and metrics, weighted means over the n global batches but for those that were skipped; NaN if all were
    weight: float  # sum of the weights: samples, or tokens
    gradient_norm: float  # of the last step, before clipping
    loss_scale: float
    skipped: int  # of the n steps, those without an update because a gradient was not finite
    finite: bool  # whether loss and (where computed) gradients of all n steps were
    sums: dict[str, float]  # loss and metrics times weight, over the n global batches
    signals: dict[str, bool]  # whether any worker asked
    step_s: float  # seconds per step in the call before this one, by the chief's clock; 0: not known yet
    compute_s: np.ndarray  # float64 [workers]: of these, how long each worker computed without waiting for others
    call: Call | None = None  # where the seconds of this call went on this worker


def means_of(sums: dict[str, float], weight: float) -> dict[str, float]:
    """Sums of values times weights -> the values' means; NaN if nothing was counted.

    Regularization only if there is any.
    """
    return {
        name: float(value / weight) if weight else float("nan")
        for name, value in sums.items()
        if name != "regularization" or value
    }


@dataclass(frozen=True)
class Fields:
    """The names of a vector's elements."""

    names: tuple[str, ...]

    def of(self, vector: Any, name: str) -> Any:
        """The element called `name`, of an array or a tensor."""
        return vector[self.names.index(name)]

    def read(self, vector: np.ndarray) -> dict[str, float]:
        return dict(zip(self.names, vector.tolist(), strict=True))


class Layout:
    """The vectors of a step: `batch`, sums over samples; `told`, what workers tell each other; `head`, what is the same
    anyway.
    """

    def __init__(self, metrics: tuple[str, ...], workers: int):
        self.batch = Fields((*FIRST_SUMS, *metrics))
        self.told = Fields((*SIGNALS, "step_s", *(f"compute_s of {rank}" for rank in range(workers))))
        self.head = Fields(_HEAD)
        self.packed = Fields((*self.head.names, *self.batch.names, *self.told.names))
        self._shown = ("loss", "regularization", *metrics)
        self._workers = workers

    def told_by(self, rank: int, signals: Requests, step_s: float, compute_s: float) -> np.ndarray:
        """float32: what worker `rank` tells; over workers these are summed."""
        said = {**signals._asdict(), f"compute_s of {rank}": compute_s, **({"step_s": step_s} if rank == 0 else {})}
        return np.array([said.get(name, 0.0) for name in self.told.names], np.float32)

    def output(self, step: int, packed: np.ndarray, n: int, call: Call) -> StepOutput:
        """Of the `packed` results of n steps."""
        found = self.packed.read(packed)
        shown = {name: found[name] for name in self._shown}
        means = means_of(shown, found["weight"])
        compute_s = np.array([found[f"compute_s of {rank}"] for rank in range(self._workers)]) / n
        return StepOutput(
            step,
            means,
            found["weight"],
            found["gradient_norm"],
            found["loss_scale"],
            int(found["skipped"]),
            not found["bad"],
            {name: shown[name] for name in means},
            {name: bool(found[name]) for name in SIGNALS},
            found["step_s"] / n,
            compute_s,
            call,
        )
