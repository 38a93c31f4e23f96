"""Ends collectives that do not end by themselves.

TensorFlow's own time-out of a collective starts two threads for every call, which sleep until the time is over, however
soon the call ends: at 100 calls a second and a time-out of 1800 s that is 360,000 threads. So it is used only where a
group meets for the first time (collectives.py). Afterwards one thread watches: whoever starts something that may wait
for others says so, and when it has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Overdue:
    """Calls `bark`, once, when something that was begun has not ended, nor anything else begun or ended, for `timeout` seconds."""

    def __init__(self, timeout: float, bark: Callable[[], None]):
        self._timeout, self._bark = timeout, bark
        self._open, self._moved = 0, 0.0
        self._changed = threading.Condition()
        threading.Thread(target=self._watch, name="tfdist-overdue", daemon=True).start()

    def begin(self) -> None:
        self._move(1)

    def end(self) -> None:
        self._move(-1)

    def _move(self, change: int) -> None:
        with self._changed:
            self._open, self._moved = self._open + change, time.monotonic()
            if self._open == 1 and change == 1:
                self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while True:
                left = self._moved + self._timeout - time.monotonic()
                if self._open <= 0:
                    self._changed.wait()
                elif left > 0:
                    self._changed.wait(left)
                else:
                    break
        self._bark()
