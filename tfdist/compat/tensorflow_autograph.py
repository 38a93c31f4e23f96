"""AutoGraph, TensorFlow's translator of Python's control flow (TensorFlow 2.21)."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

MODULES = "tensorflow.python.autograph"  # the modules whose frames stand between a translated function and its caller


def translated(function: Callable) -> Callable:
    """Converts `if` and `for` on tensors in the function, for use where the tf.function around it is traced without
    AutoGraph. Relies on tf.__internal__.autograph; without it a user's objective with an `if` on a tensor fails.
    """
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(function, autograph.control_status_ctx())
