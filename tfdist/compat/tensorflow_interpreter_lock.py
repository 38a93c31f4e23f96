"""Lets other Python threads run while TensorFlow connects a cluster.

TensorFlow holds the interpreter lock (GIL) while it waits for all workers to register. The wait has no end if one of
them has died or stopped since it was last seen, and no timeout of ours could act. The same function of its C library,
called through ctypes, does not hold the lock. If a build of TensorFlow hides that library, TensorFlow's own function is
used.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe

_LIBRARY = "libtensorflow_cc.so.2"


@contextlib.contextmanager
def interpreter_released() -> Iterator[None]:
    """Context manager in which TFE_EnableCollectiveOps is called without the interpreter lock."""
    library, original = _library(), pywrap_tfe.TFE_EnableCollectiveOps
    if library is None:
        yield
        return

    def enable(context: Any, server: bytes) -> None:
        status = library.TF_NewStatus()
        try:
            library.TFE_EnableCollectiveOps(_pointer(context), server, len(server), status)
            code, message = library.TF_GetCode(status), library.TF_Message(status).decode(errors="replace")
        finally:
            library.TF_DeleteStatus(status)
        if code:
            raise tf.errors.exception_type_from_error_code(code)(None, None, message)

    pywrap_tfe.TFE_EnableCollectiveOps = enable
    try:
        yield
    finally:
        pywrap_tfe.TFE_EnableCollectiveOps = original


def _library() -> ctypes.CDLL | None:
    """TensorFlow's C library, which is already loaded; None if it cannot be used this way."""
    try:
        library = ctypes.CDLL(str(Path(tf.__file__).parent / _LIBRARY))
        library.TF_NewStatus.restype = ctypes.c_void_p
        library.TF_NewStatus.argtypes = []
        library.TF_DeleteStatus.argtypes = [ctypes.c_void_p]
        library.TF_GetCode.argtypes = [ctypes.c_void_p]
        library.TF_Message.restype = ctypes.c_char_p
        library.TF_Message.argtypes = [ctypes.c_void_p]
        library.TFE_EnableCollectiveOps.restype = None
        library.TFE_EnableCollectiveOps.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p]
        return library
    except (OSError, AttributeError):
        return None


def _pointer(capsule: Any) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return get(capsule, None)
