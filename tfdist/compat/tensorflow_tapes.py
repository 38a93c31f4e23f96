"""Whether tapes of gradients record what is computed (TensorFlow 2.21)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tensorflow.python import pywrap_tfe


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """A context in which tapes record although a tf.init_scope is around it, which stops all of this thread. Relies on
    `TFE_Py_TapeSetIsStopped` and its kin; without it what is tried while a step is traced has no gradients."""
    was_stopped = pywrap_tfe.TFE_Py_TapeSetIsStopped()
    if was_stopped:
        pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
    try:
        yield
    finally:
        if was_stopped:
            pywrap_tfe.TFE_Py_TapeSetStopOnThread()
