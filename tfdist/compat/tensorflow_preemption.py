"""TensorFlow's own watchers of a platform's notices (TensorFlow 2.21)."""

from __future__ import annotations

import contextlib
import ctypes
import signal
from collections.abc import Iterator

from tfdist.control.repeated_look import repeatedly

_LOOK_SECONDS = 0.0001
_SIGACTION_BYTES = 256  # more than a `struct sigaction` has anywhere
_HANDLER_BYTES = ctypes.sizeof(ctypes.c_void_p)  # its first field


def google_announces_termination() -> bool:
    """Whether Google Compute Engine's metadata server says that this machine will end. Relies on tensorflow.python's
    `termination_watcher_function_gce`; without it a run there first hears of its end by SIGTERM. Raises OSError where
    the server does not answer.
    """
    from tensorflow.python.distribute.failure_handling import failure_handling_util

    return failure_handling_util.termination_watcher_function_gce()


@contextlib.contextmanager
def sigterm_kept() -> Iterator[None]:
    """A context in which TensorFlow connects a cluster; SIGTERM goes on doing what it did before.

    TensorFlow's coordination service takes SIGTERM for itself (`SigtermNotifier`) when its server starts, before the
    other workers have come, and only notes it: the worker would wait or train on until it is killed. TensorFlow cannot
    be told not to. So a thread looks, and gives the signal back within a millisecond; it needs the interpreter's lock,
    so use it with `interpreter_released`. The last look is at the end.
    """
    before = _action()

    def look() -> float | None:
        # It is taken once, and others may be waited for much longer.
        return None if _give_back(before) else _LOOK_SECONDS

    with repeatedly(look, "tfdist-sigterm"):
        yield


def _give_back(before: ctypes.Array) -> bool:
    """Gives SIGTERM back if it was taken. Returns whether it was."""
    taken = _action().raw[:_HANDLER_BYTES] != before.raw[:_HANDLER_BYTES]
    if taken:
        _C.sigaction(signal.SIGTERM, before, None)
    return taken


def _action() -> ctypes.Array:
    """The present action of SIGTERM, as the C library has it: Python only knows what it has set itself."""
    found = ctypes.create_string_buffer(_SIGACTION_BYTES)
    _C.sigaction(signal.SIGTERM, None, found)
    return found


_C = ctypes.CDLL(None)
