"""All vectors of a step, in which every number has a name: the requests of a worker (`Requests`), the layout of the
vectors in which requests and a step's results travel (`StepLayout`), their totals over the steps of a call, added up
inside the tf.function (`Totals`), and the output that the loop gets (`StepOutput`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.telemetry.phases import Call
from tfdist.training.dtypes import Gradient

FIRST_SUMS = ("loss", "weight", "regularization")  # over samples; the sums of the metrics follow
HEAD = ("gradient_norm", "loss_scale", "skipped", "bad", "compute_s")


@dataclass(frozen=True)
class Requests:
    """The requests of a worker; summed over workers in the reduction that every step makes anyway."""

    save: bool = False
    stop: bool = False
    leave: bool = False  # end this group of workers, to form another


REQUESTS = tuple(each.name for each in dataclasses.fields(Requests))
NOTHING = Requests()


@dataclass(frozen=True)
class StepOutput:
    """Results of n steps, the same on every worker."""

    step: int  # the counter after the n steps
    # Loss and metrics: weighted means over the n global batches without the skipped ones; NaN if all were skipped.
    means: dict[str, float]
    weight: float  # sum of the weights: samples, or tokens
    gradient_norm: float  # of the last step, before clipping
    loss_scale: float = 1.0
    skipped: int = 0  # number of steps without an update because a gradient was not finite
    finite: bool = True  # whether loss and (where computed) gradients of all n steps were finite
    sums: dict[str, float] = field(default_factory=dict)  # loss and metrics times weight, over the n global batches
    signals: dict[str, bool] = field(default_factory=dict)  # whether any worker asked
    step_s: float = 0.0  # seconds per step in the call before this one, by the chief's clock; 0: not known yet
    # float64 [workers]: the part of `step_s` in which each worker computed without waiting for others.
    compute_s: np.ndarray = field(default_factory=lambda: np.zeros(0))
    call: Call | None = None  # how this worker spent the seconds of this call
    news: tuple[str, ...] = ()  # messages for the user

    def why_not_finite(self, before: int, on_nan: str = "stop") -> str:
        """Returns a message about the steps since step `before`. on_nan: the value of --on_nan in this run."""
        if self.weight < 0:
            return (
                f"--objective gave negative weights between step {before} and {self.step}: losses are means with"
                " weights of at least 0; multiply the losses by an advantage."
            )
        loss = self.means["loss"]
        what = "A gradient or a weight, though not the loss," if math.isfinite(loss) else "Loss, gradients or weights"
        others = " or ".join(f"--on_nan={other}" for other in ("skip", "rollback") if other != on_nan)
        return (
            f"{what} became NaN or infinite between step {before} and {self.step} (loss {loss}): lower --learning_rate,"
            f" set --clip_norm, or use {others}."
        )


def means_of(sums: Mapping[str, float], weight: float) -> dict[str, float]:
    """Turns sums of values times weights into means of the values; NaN if the weight is 0.

    Contains regularization only if there is any.
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
        """Returns the element called `name` of an array or a tensor."""
        return vector[self.names.index(name)]

    def read(self, vector: np.ndarray) -> dict[str, float]:
        return dict(zip(self.names, vector.tolist(), strict=True))


class StepLayout:
    """The layout of the vectors of a step: `sums` over samples; `signals` between workers; `head`, values that are the
    same on all workers anyway; `whole`, all of these.
    """

    def __init__(self, metrics: tuple[str, ...], workers: int, local_replicas: int = 1):
        self.sums = Fields((*FIRST_SUMS, *metrics))
        self.signals = Fields((*REQUESTS, "step_s", *(f"compute_s of {rank}" for rank in range(workers))))
        self.head = Fields(HEAD)
        self.whole = Fields((*self.head.names, *self.sums.names, *self.signals.names))
        self._shown = ("loss", "regularization", *metrics)
        self._workers, self._local_replicas = workers, local_replicas

    def signals_of(self, rank: int, requests: Requests, step_s: float, compute_s: float) -> np.ndarray:
        """float32: the signals of worker `rank`, to be summed over all replicas: each of the worker's adds them."""
        values = {**dataclasses.asdict(requests), f"compute_s of {rank}": compute_s / self._local_replicas}
        if rank == 0:
            values["step_s"] = step_s / self._local_replicas
        return np.array([values.get(name, 0.0) for name in self.signals.names], np.float32)

    def output(self, step: int, vector: np.ndarray, call: Call, news: tuple[str, ...] = ()) -> StepOutput:
        """Returns the output that a call's `vector` describes."""
        found = self.whole.read(vector)
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


class Totals(NamedTuple):
    """Totals over the steps of one call."""

    sums: tf.Tensor  # float64: `StepLayout.sums` of the steps that took place, then `StepLayout.signals`
    gradient_norm: tf.Tensor  # float32: of the last step
    compute_s: tf.Tensor  # float64
    skipped: tf.Tensor  # int32
    bad: tf.Tensor  # bool

    @classmethod
    def of_no_step(cls, layout: StepLayout) -> Totals:
        size = len(layout.sums.names) + len(layout.signals.names)
        zero = tf.constant(0.0, tf.float64)
        return cls(tf.zeros([size], tf.float64), tf.constant(0.0), zero, tf.constant(0), tf.constant(False))

    def plus(self, step: Totals) -> Totals:
        return Totals(
            self.sums + step.sums,
            step.gradient_norm,
            self.compute_s + step.compute_s,
            self.skipped + step.skipped,
            tf.logical_or(self.bad, step.bad),
        )

    def vector(self, layout: StepLayout, loss_scale: tf.Tensor, bad: tf.Tensor) -> tf.Tensor:
        """float64: `StepLayout.whole`, one tensor, so that one copy fetches it. bad: marks the call as bad in any
        case."""
        head = {
            "gradient_norm": self.gradient_norm,
            "loss_scale": loss_scale,
            "skipped": self.skipped,
            "bad": tf.logical_or(self.bad, bad),
            "compute_s": self.compute_s,
        }
        return tf.concat([tf.stack([tf.cast(head[name], tf.float64) for name in layout.head.names]), self.sums], 0)


def shown_sums(layout: StepLayout, sums: tf.Tensor) -> tf.Tensor:
    """Returns `StepLayout.sums` of a step, all times weights. Regularization has no weights: the step's is used."""
    weight = layout.sums.of(sums, "weight")
    return sums * tf.stack([weight if name == "regularization" else 1.0 for name in layout.sums.names])


class Reduced(NamedTuple):
    """The sums of a step over all replicas."""

    per_replica: Any  # (pieces of the gradients, sums and signals), for `Runtime.run`
    gradients: list[Gradient]  # the pieces of the first local replica
    sums: tf.Tensor  # summed over samples: `StepLayout.sums`
    signals: tf.Tensor  # summed over replicas: `StepLayout.signals`


class Results(NamedTuple):
    """The results of the tf.function that makes steps."""

    step: tf.Tensor  # the counter
    vector: tf.Tensor  # float64: `StepLayout.whole`
