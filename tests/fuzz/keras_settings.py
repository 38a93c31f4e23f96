"""Keras' settings of the whole process, which a case changes: given back as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """After it, floatx and the dtype policy are what they were before, whatever happened."""
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)
