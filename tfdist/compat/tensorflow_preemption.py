"""TensorFlow's own watchers for a platform's termination notices (TensorFlow 2.21)."""

from __future__ import annotations

import contextlib
import ctypes
import signal
from collections.abc import Iterator

from tfdist.control.repeated_look import repeatedly

_LOOK_SECONDS = 0.0001
_SIGACTION_BYTES = 256  # larger than `struct sigaction` on any platform
_HANDLER_BYTES = ctypes.sizeof(ctypes.c_void_p)  # its first field


def google_announces_termination() -> bool:
    """Whether Google Compute Engine's metadata server announces the end of this machine. Relies on tensorflow.python's
    `termination_watcher_function_gce`; without it a run there first learns of its end by SIGTERM. Raises OSError if the
    server does not answer.
    """
    from tensorflow.python.distribute.failure_handling import failure_handling_util

    return failure_handling_util.termination_watcher_function_gce()


@contextlib.contextmanager
def sigterm_kept() -> Iterator[None]:
    """Context manager for connecting a cluster with TensorFlow; SIGTERM keeps its previous action.

    TensorFlow's coordination service takes over SIGTERM (`SigtermNotifier`) when its server starts, before the other
    workers have come, and only records the signal: the worker would wait or train on until it is killed. TensorFlow has
    no option against it. So a thread polls, and restores the action within a millisecond; it needs the interpreter
    lock, so use this with `interpreter_released`. The last check is at exit. A signal within this millisecond is lost;
    the worker has not trained anything yet, and a platform that gets no answer kills it.
    """
    before = _action()

    def look() -> float | None:
        # The signal is taken over once; the wait for other workers may last much longer.
        return None if _give_back(before) else _LOOK_SECONDS

    with repeatedly(look, "tfdist-sigterm"):
        yield


def _give_back(before: ctypes.Array) -> bool:
    """Restores the action of SIGTERM if it was taken over. Returns whether it was."""
    taken = _action().raw[:_HANDLER_BYTES] != before.raw[:_HANDLER_BYTES]
    if taken:
        _C.sigaction(signal.SIGTERM, before, None)
    return taken


def _action() -> ctypes.Array:
    """The present action of SIGTERM, from the C library: Python knows only the actions that it has set itself."""
    found = ctypes.create_string_buffer(_SIGACTION_BYTES)
    _C.sigaction(signal.SIGTERM, None, found)
    return found


_C = ctypes.CDLL(None)
