"""Keras' settings of the whole process, which a case changes: given back as they were; and the names it has used,
forgotten.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state

from tfdist.models import compiled_functions


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """After it, floatx and the dtype policy are what they were before, whatever happened."""
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)


def seed(number: int) -> None:
    """What of keras.utils.set_random_seed a new model's weights hang on.

    TensorFlow's own seed is left: to set it costs a second.
    """
    random.seed(number)
    np.random.seed(number)


@contextlib.contextmanager
def optimized(wanted: bool) -> Iterator[None]:
    """Within it TensorFlow rewrites graphs before it runs them, and XLA compiles LayerNormalization and GELU of any
    size; or neither, which is half of what a graph costs."""
    least = 0 if wanted else compiled_functions.LEAST
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not wanted})
    try:
        with mock.patch.object(compiled_functions, "LEAST", least):
            yield
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


def forget_names() -> None:
    """The part of keras.backend.clear_session that a new model needs: layers without a name are counted from 0 again.

    The rest, a garbage collection and a clearance of TensorFlow's kernels, would cost each case a third of a second.
    """
    global_state.GLOBAL_STATE_TRACKER = threading.local()
