"""Decides when a dead worker of a parameter-server job is started again: soon, but not for ever."""

from __future__ import annotations

import time

from tfdist.control.exit_codes import RESTARTABLE, ExitCode

_LIVED_SECONDS = 60.0  # a worker that lived this long had started well
_WAIT_SECONDS = 1.0  # until it is started again
_MOST = 5  # times in a row


class WorkerRestarts:
    """Asked about every worker at every look, by name."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}  # when it was seen dead
        self._started: dict[str, float] = {}  # when it was last started again
        self._in_a_row: dict[str, int] = {}

    def due(self, name: str, code: int | None) -> bool:
        """Whether to start it again now. `code`: its exit code; negative: the signal that killed it; None: it runs."""
        if not code:
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

    def is_pending(self, name: str) -> bool:
        """Whether it is dead and about to be started again."""
        return name in self._since
