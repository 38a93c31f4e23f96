"""Detects `pfor`, with which TensorFlow computes tf.vectorized_map and Jacobians (TensorFlow 2.21).

It traces a function once, and converts each operation into one for all elements together. Gradients that a
tf.custom_gradient has given to operations are lost in this conversion.
"""

from __future__ import annotations

import sys
from types import FrameType

from tensorflow.python.ops.parallel_for.control_flow_ops import pfor


def is_here() -> bool:
    """Whether the caller was called by a function that pfor is tracing. Relies on `pfor` being on the stack then;
    without it a gradient of a distributed model is wrong if it is taken inside tf.vectorized_map and differentiated
    again.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not pfor.__code__:
        frame = frame.f_back
    return frame is not None
