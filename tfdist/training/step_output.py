"""The output of a call of the step, and the vectors as which it travels, in which every number has a name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tfdist.telemetry.phases import Call
from tfdist.training.requests import REQUESTS, Requests

FIRST_SUMS = ("loss", "weight", "regularization")  # over samples, before those of the metrics
HEAD = ("gradient_norm", "loss_scale", "skipped", "bad", "compute_s")


@dataclass(frozen=True)
class StepOutput:
    """Results of n steps, the same on every worker."""

    step: int  # the counter after them
    # Loss and metrics, weighted means over the n global batches but for those that were skipped; NaN if all were.
    means: dict[str, float]
    weight: float  # sum of the weights: samples, or tokens
    gradient_norm: float  # of the last step, before clipping
    loss_scale: float = 1.0
    skipped: int = 0  # of the n steps, those without an update because a gradient was not finite
    finite: bool = True  # whether loss and (where computed) gradients of all n steps were
    sums: dict[str, float] = field(default_factory=dict)  # loss and metrics times weight, over the n global batches
    signals: dict[str, bool] = field(default_factory=dict)  # whether any worker asked
    step_s: float = 0.0  # seconds per step in the call before this one, by the chief's clock; 0: not known yet
    # float64 [workers]: of these, how long each worker computed without waiting for others.
    compute_s: np.ndarray = field(default_factory=lambda: np.zeros(0))
    call: Call | None = None  # where the seconds of this call went on this worker
    news: tuple[str, ...] = ()  # sentences for the user

    def why_not_finite(self, before: int) -> str:
        """A sentence about the steps since step `before`."""
        if self.weight < 0:
            return (
                f"--objective gave negative weights between step {before} and {self.step}: losses are means by weights"
                " from 0 on; multiply the losses by an advantage."
            )
        return (
            f"Loss, gradients or weights became NaN or infinite between step {before} and {self.step} (loss"
            f" {self.means['loss']}): lower --learning_rate, set --clip_norm, or use --on_nan=skip or"
            " --on_nan=rollback."
        )


def means_of(sums: Mapping[str, float], weight: float) -> dict[str, float]:
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
    """The vectors of a step: `sums` over samples; `signals`, what workers tell each other; `head`, what is the same on
    all anyway; `vector`, all of them.
    """

    def __init__(self, metrics: tuple[str, ...], workers: int):
        self.sums = Fields((*FIRST_SUMS, *metrics))
        self.signals = Fields((*REQUESTS, "step_s", *(f"compute_s of {rank}" for rank in range(workers))))
        self.head = Fields(HEAD)
        self.vector = Fields((*self.head.names, *self.sums.names, *self.signals.names))
        self._shown = ("loss", "regularization", *metrics)
        self._workers = workers

    def signals_of(self, rank: int, requests: Requests, step_s: float, compute_s: float) -> np.ndarray:
        """float32: those of worker `rank`; over workers they are summed."""
        own = {**dataclasses.asdict(requests), f"compute_s of {rank}": compute_s}
        if rank == 0:
            own["step_s"] = step_s
        return np.array([own.get(name, 0.0) for name in self.signals.names], np.float32)

    def output(self, step: int, vector: np.ndarray, call: Call, news: tuple[str, ...] = ()) -> StepOutput:
        """The output that a call's `vector` describes."""
        found = self.vector.read(vector)
        shown = {name: found[name] for name in self._shown}
        means = means_of(shown, found["weight"])
        return StepOutput(
            step=step,
            means=means,
            weight=found["weight"],
            gradient_norm=found["gradient_norm"],
            loss_scale=found["loss_scale"],
            skipped=int(found["skipped"]),
            finite=not found["bad"],
            sums={name: shown[name] for name in means},
            signals={name: bool(found[name]) for name in REQUESTS},
            step_s=found["step_s"] / call.steps,
            compute_s=np.array([found[f"compute_s of {rank}"] for rank in range(self._workers)]) / call.steps,
            call=call,
            news=news,
        )
