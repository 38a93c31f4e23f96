"""Decides how many workers a job has: as many as there is room for, between --min_workers and --workers."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from typing import Protocol

_ASK_EVERY_SECONDS = 5.0
_ANSWER_SECONDS = 30.0


class WorkerSupply(Protocol):
    """Decides how many workers a job should have."""

    count: int  # the last answer

    def ask(self) -> int:
        """Returns the number of workers to start a job with; may wait."""
        ...

    def wanted(self) -> int:
        """Returns the number of workers wanted while the job runs; never waits."""
        ...

    def failed(self, rank: int | None, progress: bool) -> None:
        """Reports that a job failed because of `rank`. progress: whether there has been a new snapshot since the
        previous failure."""

    def stop(self) -> None:
        """Makes a waiting `ask` return; for signal handlers."""


class WorkerCount:
    """A WorkerSupply for this machine: shrinks when a worker cannot be brought back, grows again later.

    If `discover` is given (a shell command that prints how many workers there is room for), its answer decides. Without
    it, a rank that causes two failures in a row, without progress in between, counts as gone; it is tried again after
    `grow_after` seconds, and each time that fails the wait doubles. `fits` says which numbers of workers are possible.

    left_out: ranks of the whole job, of `most` workers, whose places (their GPUs) the job does without meanwhile.
    """

    def __init__(
        self,
        most: int,
        least: int,
        discover: str = "",
        grow_after: float = 300.0,
        fits: Callable[[int], bool] = lambda count: True,
        now: Callable[[], float] = time.monotonic,
    ):
        self.most, self.least, self.discover = most, least or most, discover
        self.grow_after, self._fits, self._now = grow_after, fits, now
        self.count, self.left_out = most, list[int]()
        self._last_root_cause: int | None = None  # the rank
        self._grow_at: float | None = None
        self._asking: threading.Thread | None = None
        self._asked_at = float("-inf")
        self._stopped = False

    def failed(self, rank: int | None, progress: bool) -> None:
        """Reports that a job failed because of `rank`. progress: whether there has been a new snapshot since the
        previous failure."""
        repeated = rank is not None and rank == self._last_root_cause and not progress
        self._last_root_cause = rank
        if repeated and not self.discover and (fewer := self._at_most(self.count - 1)):
            places = [place for place in range(self.most) if place not in self.left_out]
            kept = [place for each, place in enumerate(places) if each != rank][:fewer]
            self.count, self.left_out = fewer, [place for place in range(self.most) if place not in kept]
            self._last_root_cause, self._grow_at = None, self._now() + self.grow_after
            self.grow_after *= 2

    def _at_most(self, count: int) -> int:
        """Returns the largest possible number of workers up to `count`; 0 if there are too few."""
        return next((each for each in range(count, self.least - 1, -1) if self._fits(each)), 0)

    def wanted(self) -> int:
        """Returns the number of workers wanted now. Never waits for the answer of `discover`."""
        if self.discover:
            self._ask()
        elif self._grow_at is not None and self._now() >= self._grow_at:
            self.count, self.left_out, self._grow_at = self.most, [], None
            self._last_root_cause = None  # ranks mean other places now
        return self.count

    def ask(self) -> int:
        """Waits for an answer of `discover` and returns the number of workers wanted."""
        if self.discover:
            self._ask()
            while self._asking and self._asking.is_alive() and not self._stopped:
                self._asking.join(0.1)
        return self.wanted()

    def stop(self) -> None:
        """Makes a waiting `ask` return; for signal handlers."""
        self._stopped = True

    def _ask(self) -> None:
        if (self._asking and self._asking.is_alive()) or self._now() - self._asked_at < _ASK_EVERY_SECONDS:
            return
        self._asked_at = self._now()
        self._asking = threading.Thread(target=self._answer, name="tfdist-discover", daemon=True)
        self._asking.start()

    def _answer(self) -> None:
        try:
            output = subprocess.run(
                self.discover, shell=True, capture_output=True, text=True, timeout=_ANSWER_SECONDS
            ).stdout
            self.count = self._at_most(max(self.least, min(self.most, int(output.split()[-1])))) or self.count
        except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
            pass  # no answer: keep the last one
