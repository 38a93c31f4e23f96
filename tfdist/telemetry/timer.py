"""The clock of a run: seconds of training, over all attempts, without pauses for evaluation and saving."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator


class Clock:
    """Counts while running. now: returns a monotonic time in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._counted = 0.0
        self._since: float | None = None
        self.pauses: dict[str, float] = {}  # name -> seconds

    @property
    def seconds(self) -> float:
        """Training seconds so far."""
        return self._counted + (self._now() - self._since if self._since is not None else 0.0)

    def start(self) -> None:
        if self._since is None:
            self._since = self._now()

    def stop(self) -> None:
        self._counted, self._since = self.seconds, None

    @contextlib.contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """Stops the clock during the context and counts that time under `name`. A stopped clock stays stopped."""
        running = self._since is not None
        self.stop()
        begin = self._now()
        try:
            yield
        finally:
            self.pauses[name] = self.pauses.get(name, 0.0) + self._now() - begin
            if running:
                self.start()

    def state(self) -> dict:
        """Returns the state that a snapshot stores, as JSON types."""
        return {"seconds": self.seconds, "pauses": dict(self.pauses)}

    def restore(self, state: dict) -> None:
        """Continues counting from a snapshot's state; the clock is stopped."""
        self._counted, self.pauses = state["seconds"], dict(state["pauses"])
        self._since = None


def process_seconds() -> float:
    """Returns seconds since this process began, interpreter start and imports included; 0 if the system has no data."""
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return 0.0
