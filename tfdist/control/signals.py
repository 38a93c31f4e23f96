"""Signals as requests: SIGTERM asks for "save and stop", SIGUSR1 for "save and go on".

A handler only sets a flag. The loop hands the flags to the next step, whose reduction tells them to every worker, so
that all save (and stop) at the same step, whichever worker was signalled.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from tfdist.control.exit_codes import ExitCode
from tfdist.control.terminal import say_at_once

_SAME_REQUEST_SECONDS = 1.0  # some engines signal the process and its group, and so twice


class SignalRequests:
    """The requests of this process; `save` and `stop` are read by the loop."""

    def __init__(self) -> None:
        self.save = False
        self.stop = False
        self.on_stop: Callable[[], None] = lambda: None  # called once, in the handler
        self._stopped_at = 0.0

    def install(self) -> SignalRequests:
        """Takes over SIGTERM and SIGUSR1; only in the main thread. A second SIGTERM ends the process at once."""
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGUSR1, self._on_usr1)
        return self

    def _on_term(self, *_) -> None:
        if self.stop and time.monotonic() - self._stopped_at < _SAME_REQUEST_SECONDS:
            return
        if self.stop:
            say_at_once("tfdist: second SIGTERM: ending at once, without saving.")
            os._exit(128 + signal.SIGTERM)
        self.stop, self._stopped_at = True, time.monotonic()
        self.on_stop()
        what = "saving at the next boundary, if all workers answer, then ending with exit code"
        say_at_once(f"tfdist: SIGTERM: {what} {ExitCode.PREEMPTED.value}.")

    def _on_usr1(self, *_) -> None:
        self.save = True
