"""Synchronous steps on parameter servers: a batch is cut into slices, one per worker except for the backup workers; the
sum of their gradients makes one update.

With B backup workers (Chen et al. 2016, arXiv:1604.00981) there are N slices for N + B workers: some slices are handed
out twice from the start, others once they are late, and the first result of each counts; later results are dropped and
counted. In that paper each of the N + B workers has its own samples, and the samples of the last B are lost. Here no
sample is lost, and a step has the same batch as with any strategy.
"""

from __future__ import annotations

import statistics
import time
from collections import deque

import numpy as np
import tensorflow as tf

from tfdist.training.parameter_server.remote_step import RemoteStep, Result
from tfdist.training.parameter_server.server_steps import LOOK_SECONDS, ServerSteps, StepResult, Workers

_LATE_LOOK_SECONDS = 0.01  # between checks for late slices
_LATE = 1.5  # a slice that takes this many times the usual time is late


class Synchronous(ServerSteps):
    """Every batch is one update by all workers."""

    def __init__(self, remote: RemoteStep, workers: Workers, done: int):
        super().__init__(remote, workers, done, workers.count)
        self.slices = workers.count - workers.backup_count
        self._seconds: deque[float] = deque(maxlen=100)  # durations of the last slices

    def _next(self, last: int) -> StepResult:
        results = self._slices(self.done)
        sums = np.sum([result.sums for result in results], axis=0)
        loss, weight = (tf.constant(self.remote.sums.of(sums, name), tf.float32) for name in ("loss", "weight"))
        norm, finite = self.remote.apply(self.remote.combine(results), loss, weight)
        return StepResult(sums, float(norm), bool(finite))

    def _slices(self, step: int) -> list[Result]:
        """Returns the result of every slice of batch `step`, in order."""
        results: dict[int, Result] = {}
        begun: dict[int, list[float]] = {index: [] for index in range(self.slices)}  # when each was handed out
        planned = self.calls.free()  # workers that are still busy with an earlier step are among the backup workers
        while len(results) < self.slices:
            while self.calls.free() and (index := self._next_slice(begun, results, planned)) is not None:
                begun[index].append(time.monotonic())
                self.calls.begin((step, index), self.remote.differentiate, step, self.workers.position(step), index)
            for (of_step, index), result in self._look(
                _LATE_LOOK_SECONDS if self.workers.backup_count else LOOK_SECONDS
            ):
                if of_step == step and result is None:
                    begun[index].pop()
                elif of_step == step and result and index not in results and result.version == step:
                    results[index] = result
                    self._seconds.append(time.monotonic() - begun[index][0])
                elif result:
                    self.recent.add(step - of_step, applied=False)
        return [results[index] for index in range(self.slices)]

    def _next_slice(self, begun: dict[int, list[float]], results: dict[int, Result], planned: int) -> int | None:
        """Returns the slice to hand out now: one that nobody has; while fewer than `planned` were handed out, one that
        is not done; or one that is late.
        """
        open_ = sorted(
            (index for index in begun if index not in results and len(begun[index]) <= self.workers.backup_count),
            key=lambda index: len(begun[index]),
        )
        if not open_:
            return None
        if not begun[open_[0]] or (not results and sum(map(len, begun.values())) < planned):
            return open_[0]
        late = time.monotonic() - _LATE * statistics.median(self._seconds) if self._seconds else 0.0
        return next((index for index in open_ if begun[index][-1] < late), None)
