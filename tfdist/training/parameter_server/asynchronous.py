"""Asynchronous steps on parameter servers: every batch is one update, made by the worker that has the batch."""

from __future__ import annotations

from collections import deque

from tfdist.training.parameter_server.remote_step import RemoteStep, Result
from tfdist.training.parameter_server.server_steps import ServerSteps, StepResult, Workers
from tfdist.training.step_output import NOTHING

_AHEAD = 2  # calls per worker under way at a time, so that no worker waits for the chief


class Asynchronous(ServerSteps):
    """Asynchronous steps: up to `_AHEAD` batches per worker are under way, across calls of the loop."""

    def __init__(self, remote: RemoteStep, workers: Workers, done: int):
        super().__init__(remote, workers, done, _AHEAD * workers.count)
        self._begun = done  # batches handed out
        self._too_stale: list[int] = []  # batches to be handed out again
        self._came: deque[Result | None] = deque()  # results that are not counted yet

    @property
    def under_way(self) -> bool:
        return self._begun > self.done

    def _next(self, last: int) -> StepResult | None:
        while not self._came:
            self._hand_out(last)
            for number, result in self._look():
                if result and result.finite and not result.applied:
                    self._too_stale.append(number)
                    self.recent.add(result.staleness, applied=False)
                else:
                    self._came.append(result)
        self._hand_out(last)  # before the loop continues with something else
        result = self._came.popleft()
        if result is None:
            return None
        if result.applied:
            self.recent.add(result.staleness, applied=True)
        return StepResult(result.sums, result.norm, result.finite)

    def _hand_out(self, last: int) -> None:
        """Begins as many batches as may be under way: those before the next use of the state; after a request only
        those that this call, which ends with step `last`, must make.
        """
        until = self.workers.next_use_of_state(self.done) if self.requested == NOTHING else last
        while self.calls.free() and (self._too_stale or self._begun < until):
            number = self._too_stale.pop(0) if self._too_stale else self._begun
            self._begun = max(self._begun, number + 1)
            self.calls.begin(number, self.remote.update, number, self.workers.position(number))
