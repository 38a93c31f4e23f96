"""Whether gradient tapes record (TensorFlow 2.21)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tensorflow.python import pywrap_tfe


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Context manager in which tapes record even inside a tf.init_scope, which stops all tapes of this thread. Relies
    on `TFE_Py_TapeSetIsStopped` and its kin; without it a trial made while a step is traced has no gradients."""
    was_stopped = pywrap_tfe.TFE_Py_TapeSetIsStopped()
    if was_stopped:
        pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
    try:
        yield
    finally:
        if was_stopped:
            pywrap_tfe.TFE_Py_TapeSetStopOnThread()
