"""Process-wide settings of Keras that a case changes: restores them, and makes Keras forget the names that the case has
used.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common import global_state

from tfdist.models import compiled_functions


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Context manager that restores floatx and the dtype policy at exit, whatever happened."""
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)


@contextlib.contextmanager
def sums_of_numpy() -> Iterator[None]:
    """Context manager in which Keras adds as NumPy does. Otherwise, in batches of some sizes, it mistakes a number for
    each row, or position, for a bias of the channels."""

    def add(x1: Any, x2: Any) -> tf.Tensor:
        dtype = keras.backend.result_type(*(getattr(each, "dtype", type(each)) for each in (x1, x2)))
        return tf.add(*(keras.ops.convert_to_tensor(each, dtype) for each in (x1, x2)))

    with mock.patch.object(backend.numpy, "add", add):
        yield


def seed(number: int) -> None:
    """Does the part of keras.utils.set_random_seed on which the weights of a new model depend.

    TensorFlow's own seed is left as it is: setting it takes a second.
    """
    random.seed(number)
    np.random.seed(number)


@contextlib.contextmanager
def optimized(wanted: bool) -> Iterator[None]:
    """Context manager. wanted: TensorFlow rewrites graphs before it runs them, and XLA compiles LayerNormalization and
    GELU of any size. Otherwise neither is done, which saves half of what a graph costs."""
    least = 0 if wanted else compiled_functions.LEAST
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not wanted})
    try:
        with mock.patch.object(compiled_functions, "LEAST", least):
            yield
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


def forget_names() -> None:
    """Does the part of keras.backend.clear_session that a new model needs: unnamed layers are counted from 0 again.

    The rest, a garbage collection and clearing TensorFlow's kernels, would cost each case a third of a second.
    """
    global_state.GLOBAL_STATE_TRACKER = threading.local()
