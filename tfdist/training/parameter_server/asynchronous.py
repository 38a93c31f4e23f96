"""The outer loop of a parameter-server run, on the chief: hands out batches by number, collects what came of them.

Asynchronous: every batch is one update, made by whichever worker has it; up to `_AHEAD` a worker are given out at a
time.
Synchronous: a batch is cut into slices, one per worker but for the backup workers; the sum of their gradients is one
update. With B backup workers (Chen et al. 2016, arXiv:1604.00981) there are N slices for N + B workers: some slices are
given out twice from the start, others once they are late, and the first result of each counts; those that come later
are dropped and counted. In that paper each of N + B workers has samples of its own, and those of the last B are lost.
Here no sample is lost, and a step has the batch that it has with any strategy.

Batches are given out in order and each is done before the next evaluation, snapshot or end, so that there, and only
there, `step` batches are done and no others: what a snapshot needs.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.control.exit_codes import DivergedError
from tfdist.telemetry.events import Event
from tfdist.telemetry.staleness import Staleness
from tfdist.training.log_interval import Interval
from tfdist.training.loop import LoopHooks, TrainResult
from tfdist.training.parameter_server.remote_step import RemoteStep, Result
from tfdist.training.step_output import StepOutput, means_of

_AHEAD = 2  # calls per worker given out at a time, so that none waits for the chief
_LOOK_SECONDS = 0.2  # between looks at signals and at who is lost
_LATE_LOOK_SECONDS = 0.01  # between looks at what is late
_LATE = 1.5  # a slice that takes this many times as long as usual is late


@dataclass
class Servers:
    """What drives workers and parameter servers."""

    step: RemoteStep
    call: Callable[[Any, tuple], Callable[[], tuple]]  # see ParameterServer.call
    news: Callable[[], list[str]]  # sentences about workers that left or came back; raises PeerLostError
    workers: int
    backup_workers: int
    skip_non_finite: bool


class Calls:
    """Calls that are under way, at most `most`."""

    def __init__(self, servers: Servers, most: int):
        self.servers, self.most = servers, most
        self._pool = ThreadPoolExecutor(most, "tfdist-call")
        self._tags: dict[Future, Any] = {}

    def free(self) -> int:
        return self.most - len(self._tags)

    def give(self, tag: Any, function: Any, *numbers: int) -> None:
        """Begins a call with these numbers; its result comes back with `tag`."""
        arguments = tuple(tf.constant(number, tf.int64) for number in numbers)
        self._tags[self._pool.submit(self._make, function, arguments)] = tag

    def collect(self, seconds: float) -> list[tuple[Any, Result | None]]:
        """What has come back, after `seconds` at most; None: it was done, but its worker died before it could tell."""
        done, _ = wait(self._tags, seconds, FIRST_COMPLETED)
        return [(self._tags.pop(future), future.result()) for future in done]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _make(self, function: Any, arguments: tuple) -> Result | None:
        fetch = self.servers.call(function, arguments)
        fetched = fetch()
        return None if fetched is None else self.servers.step.result(fetched)


class Trainer:
    """One parameter-server run; `advance` is what the two modes differ in."""

    def __init__(self, hooks: LoopHooks, servers: Servers, calls_at_a_time: int):
        self.hooks, self.servers, self.step = hooks, servers, servers.step
        self.calls = Calls(servers, calls_at_a_time)
        self.staleness, self.recent = Staleness(), Staleness()  # of the run; since the last log line
        self.updates = 0  # in this process
        self.interval = Interval(hooks.clock, hooks.global_batch, hooks.position, hooks.rates)

    def train(self, step: int) -> TrainResult:
        """Trains from `step` to the schedule's target. Raises DivergedError, PeerLostError."""
        hooks, schedule = self.hooks, self.hooks.schedule
        evaluation: dict[str, float] = {}
        evaluated_at, stopped = -1, False
        hooks.clock.start()
        while step < schedule.target and not stopped:
            periods = [period for period in (schedule.eval_every, schedule.save_every) if period > 0]
            boundary = min([schedule.target, *((step // period + 1) * period for period in periods)])
            before = step
            step, save, stopped = self.advance(step, boundary)
            with hooks.clock.pause("saving"), hooks.section("save"):
                self.step.parameters.pull(step)
            if hooks.evaluate and schedule.due(schedule.eval_every, before, step):
                evaluation, evaluated_at = self._evaluate(step), step
            if (
                save
                or stopped
                or (schedule.save_at_evaluation and evaluated_at == step)
                or schedule.due(schedule.save_every, before, step)
            ):
                with hooks.clock.pause("saving"), hooks.section("save"):
                    hooks.save(step)
        if hooks.evaluate and schedule.eval_every >= 0 and evaluated_at != step and not stopped:
            evaluation = self._evaluate(step)
        hooks.clock.stop()
        self.calls.close()
        return TrainResult(step, stopped, evaluation)

    def advance(self, step: int, boundary: int) -> tuple[int, bool, bool]:
        """Trains from `step` to `boundary`, or less far if a save or stop is asked for: (step, save, stop).

        Nothing is under way afterwards.
        """
        raise NotImplementedError

    def _evaluate(self, step: int) -> dict[str, float]:
        with self.hooks.clock.pause("evaluation"), self.hooks.section("evaluation"):
            evaluation = self.hooks.evaluate()
        self.hooks.observer(Event("eval", step, {f"eval/{name}": value for name, value in evaluation.items()}))
        return evaluation

    def section(self) -> AbstractContextManager:
        """For the watchdog: until something comes back."""
        return self.hooks.section("step" if self.updates else "first step")

    def look(self, step: int, seconds: float = _LOOK_SECONDS) -> list[tuple[Any, Result | None]]:
        """What has come back within `seconds`. Also tells who left."""
        for sentence in self.servers.news():
            self.hooks.observer(Event("warning", step, {"message": sentence}))
        return self.calls.collect(seconds)

    def count(self, step: int, sums: np.ndarray, norm: float, finite: bool) -> None:
        """Adds update number `step` to the interval, and tells of it when it is due. Raises DivergedError."""
        named = self.step.sums.read(sums)
        if not finite and not self.servers.skip_non_finite:
            raise DivergedError(
                f"Loss or gradients became NaN or infinite at step {step} (loss"
                f" {named['loss'] / max(named['weight'], 1e-30)}): lower --learning_rate, set --clip_norm, or use"
                " --on_nan=skip."
            )
        if not finite:  # it did not take place
            named = dict.fromkeys(named, 0.0)
            self.step.parameters.skipped += 1
        weight = named.pop("weight")
        named["regularization"] *= weight
        means = means_of(named, weight)
        self.interval.add(
            StepOutput(
                step=step,
                means=means,
                weight=weight,
                gradient_norm=norm,
                skipped=int(not finite),
                finite=finite,
                sums={name: named[name] for name in means},
            ),
            1,
            last=step == self.hooks.schedule.target,
        )
        self.updates += 1
        if self.updates == 1:  # see loop.py
            gc.collect()
            gc.freeze()
        schedule = self.hooks.schedule
        if schedule.due(schedule.log_every, step - 1, step) or step == schedule.target:
            self._log(step)

    def _log(self, step: int) -> None:
        self.step.parameters.optimizer.iterations.assign(
            step - self.step.parameters.skipped
        )  # the chief's: for the learning rate that is told
        event = self.interval.event(step, self.hooks.told())
        self.hooks.observer(Event("train", step, {**event.values, **self.recent.values()}))
        self.staleness.merge(self.recent)
        self.recent = Staleness()


class Asynchronous(Trainer):
    """Every batch an update of its own."""

    def __init__(self, hooks: LoopHooks, servers: Servers):
        super().__init__(hooks, servers, _AHEAD * servers.workers)

    def advance(self, step: int, boundary: int) -> tuple[int, bool, bool]:
        given = done = step
        again: list[int] = []  # batches whose gradient was too stale
        save = stop = False
        while done < boundary:
            while self.calls.free() and (again or given < boundary):
                number = again.pop(0) if again else given
                given = max(given, number + 1)
                self.calls.give(number, self.step.update, number, self.hooks.position(number))
            found = []
            with self.section():
                while not found:
                    found = self.look(done)
            for number, result in found:
                if result and result.finite and not result.applied:
                    again.append(number)
                    self.recent.add(result.staleness, applied=False)
                    continue
                done += 1
                if result:
                    if result.applied:
                        self.recent.add(result.staleness, applied=True)
                    self.count(done, result.sums, result.norm, result.finite)
            asked = self.hooks.requests(done)
            save, stop = save or asked.save, stop or asked.stop
            boundary = given if save or stop else boundary
        return done, save, stop


class Synchronous(Trainer):
    """Every batch an update of all workers."""

    def __init__(self, hooks: LoopHooks, servers: Servers):
        super().__init__(hooks, servers, servers.workers)
        self.slices = servers.workers - servers.backup_workers
        self.seconds: deque[float] = deque(maxlen=100)  # that the last slices took

    def advance(self, step: int, boundary: int) -> tuple[int, bool, bool]:
        save = stop = False
        while step < boundary and not (save or stop):
            results = self._slices(step)
            norm, finite = self.step.apply(
                tf.constant(self.step.combine(results)),
                tf.constant(sum(self.step.sums.of(result.sums, "weight") for result in results), tf.float32),
            )
            step += 1
            self.count(step, np.sum([result.sums for result in results], axis=0), float(norm), bool(finite))
            asked = self.hooks.requests(step)
            save, stop = asked.save, asked.stop
        return step, save, stop

    def _slices(self, step: int) -> list[Result]:
        """The result of every slice of batch `step`, in order."""
        results: dict[int, Result] = {}
        begun: dict[int, list[float]] = {index: [] for index in range(self.slices)}  # when each was given out
        planned = self.calls.free()  # those that are still busy with an earlier step are among the backup workers
        with self.section():
            while len(results) < self.slices:
                while self.calls.free() and (index := self._next(begun, results, planned)) is not None:
                    begun[index].append(time.monotonic())
                    self.calls.give((step, index), self.step.differentiate, step, self.hooks.position(step), index)
                for (of_step, index), result in self.look(
                    step, _LOOK_SECONDS if not self.servers.backup_workers else _LATE_LOOK_SECONDS
                ):
                    if of_step == step and result is None:
                        begun[index].pop()
                    elif of_step == step and index not in results and result.version == step:
                        results[index] = result
                        self.seconds.append(time.monotonic() - begun[index][0])
                    elif result:
                        self.recent.add(step - of_step, applied=False)
        return [results[index] for index in range(self.slices)]

    def _next(self, begun: dict[int, list[float]], results: dict[int, Result], planned: int) -> int | None:
        """The slice to give out now: one that nobody has; while fewer than `planned` were given out, one that is not
        done; one that is late.
        """
        open_ = sorted(
            (index for index in begun if index not in results and len(begun[index]) <= self.servers.backup_workers),
            key=lambda index: len(begun[index]),
        )
        if not open_:
            return None
        if not begun[open_[0]] or (not results and sum(map(len, begun.values())) < planned):
            return open_[0]
        late = time.monotonic() - _LATE * statistics.median(self.seconds) if self.seconds else 0.0
        return next((index for index in open_ if begun[index][-1] < late), None)
