"""Steps by the workers of a parameter-server run, on the chief: training/loop.py drives them instead of a TrainStep.

Batches are handed out by number, in order. Several may be under way, also while the loop does other things between two
calls. But at a step whose state is used (`Workers.next_use_of_state`), and only there, exactly that many batches are
done, as an evaluation or a snapshot needs. If a save or stop is requested in between, no more batches are handed out,
and the answer comes with the last step that was under way.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdist.control.exit_codes import ConfigError, DivergedError
from tfdist.telemetry.staleness import Staleness
from tfdist.training.parameter_server.remote_calls import Call, RemoteCalls
from tfdist.training.parameter_server.remote_step import RemoteStep, Result
from tfdist.training.step_output import NOTHING, Requests, StepOutput, means_of

LOOK_SECONDS = 0.2  # between checks for lost workers


@dataclass(frozen=True)
class Workers:
    """The workers that make the steps, and what they need to know about the run."""

    call: Call
    news: Callable[[], list[str]]  # sentences about workers that left or came back; raises PeerLostError
    warn: Callable[[int, str], None]  # takes a step and a sentence
    count: int
    backup_count: int  # how many of these are backup workers, see synchronous.py
    skip_non_finite: bool
    position: Callable[[int], int]  # step -> samples consumed
    next_use_of_state: Callable[[int], int]  # see LoopSchedule


@dataclass(frozen=True)
class StepResult:
    """The result of one step."""

    sums: np.ndarray  # float64, see RemoteStep.sums
    norm: float  # of the gradient, before clipping
    finite: bool


class ServerSteps(ABC):
    """Makes steps; the two modes differ in `_next`. done: number of steps so far."""

    def __init__(self, remote: RemoteStep, workers: Workers, done: int, calls_at_a_time: int):
        self.remote, self.workers, self.done = remote, workers, done
        self.calls = RemoteCalls(workers.call, remote.result, calls_at_a_time)
        self.staleness, self.recent = Staleness(), Staleness()  # of the whole run; since the last log line
        self.requested = NOTHING  # requests that are not yet answered
        self._norm = 0.0
        self._pulled = done

    @property
    def under_way(self) -> bool:
        """Whether steps beyond `done` have begun."""
        return False

    @abstractmethod
    def _next(self, last: int) -> StepResult | None:
        """Makes one more step, in a call that ends with step `last`.

        Returns None if the step was made but its result is lost.
        """

    def __call__(self, iterators: Sequence, n: int, requests: Requests) -> StepOutput:
        """Makes n steps, see training/loop.py. `iterators` is not used: workers find their samples by number."""
        before = self.requested
        self.requested = Requests(before.save or requests.save, before.stop or requests.stop)
        totals: dict[str, float] = dict.fromkeys(self.remote.sums.names, 0.0)
        last, skipped = self.done + n, 0
        while self.done < last:
            result = self._next(last)
            self.done += 1
            if result is None:
                continue
            sums = self._sums(result)
            skipped += not result.finite
            self._norm = result.norm
            totals = {name: total + sums[name] for name, total in totals.items()}
        self.remote.parameters.skipped += skipped
        answered = NOTHING if self.under_way else self.requested
        if not self.under_way:
            self.requested = NOTHING
        weight = totals.pop("weight")
        means = means_of(totals, weight)
        return StepOutput(
            step=self.done,
            means=means,
            weight=weight,
            gradient_norm=self._norm,
            skipped=skipped,
            sums={name: totals[name] for name in means},
            signals=dataclasses.asdict(answered),
            news=self.remote.connected.news(),
        )

    def _sums(self, result: StepResult) -> dict[str, float]:
        """The sums over the samples of a step, all zero if it was skipped. Raises DivergedError."""
        sums = self.remote.sums.read(result.sums)
        if result.finite:
            return sums | {"regularization": sums["regularization"] * sums["weight"]}
        if self.workers.skip_non_finite:
            return dict.fromkeys(sums, 0.0)
        raise DivergedError(
            f"Loss or gradients became NaN or infinite at step {self.done} (loss"
            f" {sums['loss'] / max(sums['weight'], 1e-30)}): lower --learning_rate, set --clip_norm, or use"
            " --on_nan=skip."
        )

    def _look(self, seconds: float = LOOK_SECONDS) -> list[tuple[Any, Result | None]]:
        """Returns the results that came back within `seconds`. Also reports workers that left or came back."""
        for sentence in self.workers.news():
            self.workers.warn(self.done, sentence)
        return self.calls.collect(seconds)

    def pull_state(self, step: int) -> None:
        """Copies the servers' values to the chief's model and optimizer, when exactly `step` steps are done."""
        if step != self._pulled:
            self.remote.parameters.pull(step)
            self._pulled = step

    def show_weights(self) -> None:
        """Copies the servers' values to the chief's model between two uses of the state. Raises ConfigError while steps
        are under way: the servers then hold the weights of no step."""
        if self.under_way:
            raise ConfigError(
                f"--ps_mode=async: the weights cannot be read at step {self.done}, since workers update them: use"
                " --ps_mode=sync."
            )
        self.pull_state(self.done)

    def extra_values(self) -> dict[str, float]:
        """Returns the values that only this kind of run adds to the train event; also updates the chief's step and
        learning rate."""
        self.remote.parameters.set_local_step(self.done)
        recent, self.recent = self.recent, Staleness()
        self.staleness.merge(recent)
        return recent.values()

    def close(self) -> None:
        self.calls.close()
