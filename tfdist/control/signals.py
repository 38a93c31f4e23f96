"""Signals as requests: SIGTERM and SIGHUP ask for "save and stop", SIGUSR1 for "save and continue".

A handler only sets a flag. The loop passes the flags to the next step, whose all-reduce tells them to every worker, so
that all save (and stop) at the same step, whichever worker got the signal.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from tfdist.control.exit_codes import ExitCode
from tfdist.control.terminal import say_at_once

_SAME_REQUEST_SECONDS = 1.0
_IGNORED_IN_A_FORK = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_masks = threading.local()  # the signals that a thread that forks had blocked before


def on_hangup(handler: Callable[..., Any]) -> None:
    """Installs a handler for SIGHUP (sent when a terminal is closed), unless the signal is ignored (nohup).

    Must be called in the main thread.
    """
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, handler)


class StopSignals:
    """Distinguishes a second request to stop, which ends the process at once, from a first request that was sent twice,
    which must not: the process is still saving."""

    def __init__(self) -> None:
        self._asked_at = 0.0  # time of the first SIGTERM or SIGINT; 0: none yet

    def is_second(self, number: int) -> bool:
        """Returns whether a signal is a second request. SIGHUP never is: a closed terminal may send it twice, and
        SIGTERM may follow. A later SIGTERM is one unless it follows at once, since some engines signal a process and
        also its group. A later SIGINT always is one, since somebody has typed it."""
        if number == signal.SIGHUP:
            return False
        now, before = time.monotonic(), self._asked_at
        self._asked_at = before or now
        return bool(before) and (number == signal.SIGINT or now - before >= _SAME_REQUEST_SECONDS)


class SignalRequests:
    """The requests that this process has received; the loop reads `save` and `stop`."""

    def __init__(self) -> None:
        self.save = False
        self.stop = False
        self.all_saved = False  # training is over: a request has no effect
        self.on_stop: Callable[[], None] = lambda: None  # called once, in the handler
        self._signalled = False  # `stop` may have been set without a signal, by the platform's notice
        self._signals = StopSignals()

    def install(self) -> SignalRequests:
        """Installs handlers for SIGTERM, SIGUSR1 and, unless it is ignored (nohup), SIGHUP. Must be called in the main
        thread. A second SIGTERM ends the process at once.

        Processes that a user's data source forks from now on do not inherit the handlers: Python, at the end of a run,
        asks them to end by SIGTERM, and waits for them.
        """
        _have_forks_drop_handlers()
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGUSR1, self._on_usr1)
        on_hangup(self._on_stop)
        return self

    def _on_stop(self, number: int, *_) -> None:
        if self._signals.is_second(number):
            how = "; training was over" if self.all_saved else ", without saving"
            say_at_once(f"tfdist: second SIGTERM: ending at once{how}.")
            os._exit(128 + signal.SIGTERM)
        if self._signalled:
            return
        self._signalled = self.stop = True
        what = "training is over; the run is being completed"
        if not self.all_saved:
            self.on_stop()
            what = "saving at the next boundary, if all workers answer, then ending with exit code"
            what = f"{what} {ExitCode.PREEMPTED.value}"
        say_at_once(f"tfdist: {signal.Signals(number).name}: {what}.")

    def _on_usr1(self, *_) -> None:
        self.save = True


@functools.cache  # once per process: what is registered stays
def _have_forks_drop_handlers() -> None:
    os.register_at_fork(before=_hold_sigterm, after_in_parent=_let_sigterm_through, after_in_child=_drop_handlers)


def _hold_sigterm() -> None:
    """Python forgets a signal that comes between the fork and `_drop_handlers`; a blocked one comes afterwards."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_sigterm_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _drop_handlers() -> None:
    """What a forked process does on a signal for which its parent has a handler. SIGTERM ends it, by the system's own
    handler: one of Python's would be called too late if the signal came just before a call that waits, say for a queue.
    The others ask only the worker for something, also if they are sent to its whole group of processes."""
    for number in _IGNORED_IN_A_FORK:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)
    if callable(signal.getsignal(signal.SIGTERM)):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _let_sigterm_through()
