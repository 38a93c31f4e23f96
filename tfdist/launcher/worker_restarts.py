"""Decides when a dead worker of a parameter-server job is restarted: soon, but not endlessly."""

from __future__ import annotations

import time

from tfdist.control.backoff import wait_seconds
from tfdist.control.exit_codes import RESTARTABLE, ExitCode

_LIVED_SECONDS = 60.0  # a worker that ran this long had started well
_WAIT_SECONDS = 1.0  # before the restart
_MOST = 5  # restarts in a row
_LONGEST_WAIT_SECONDS = 60.0  # between tries to start one that cannot be started


class WorkerRestarts:
    """Decides about restarts of workers, by name. `due` is called for every worker in every poll of the job."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}  # when the worker was first seen dead
        self._started: dict[str, float] = {}  # when it was last restarted
        self._in_a_row: dict[str, int] = {}
        self._not_started: dict[str, int] = {}  # how often in a row it could not be started

    def due(self, name: str, code: int | None) -> bool:
        """Returns whether to restart the worker now. code: its exit code; negative: the signal that killed it; None: it
        is running."""
        if not code:
            self._not_started.pop(name, None)
            return False
        now = time.monotonic()
        if name not in self._since:
            if now - self._started.get(name, now) > _LIVED_SECONDS:
                self._in_a_row[name] = 0
            hopeless = code > 0 and code not in RESTARTABLE and code in set(ExitCode)
            if hopeless or self._in_a_row.get(name, 0) >= _MOST:
                return False
            self._since[name] = now
        if now - self._since[name] < _WAIT_SECONDS:
            return False
        del self._since[name]
        self._started[name] = now
        self._in_a_row[name] = self._in_a_row.get(name, 0) + 1
        return True

    def not_started(self, name: str) -> None:
        """Notes that the restart that was due has failed, which is no death of the worker: it is due again later."""
        self._in_a_row[name] -= 1
        self._not_started[name] = self._not_started.get(name, 0) + 1
        wait = wait_seconds(self._not_started[name], _LONGEST_WAIT_SECONDS)
        self._since[name] = time.monotonic() + wait - _WAIT_SECONDS

    def is_pending(self, name: str) -> bool:
        """Returns whether the worker is dead and about to be restarted."""
        return name in self._since
