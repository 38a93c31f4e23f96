"""tf.vectorized_map, and how TensorFlow computes Jacobians: its `pfor` (TensorFlow 2.21).

It traces a function once, and makes each operation anew for all elements together. Gradients that a tf.custom_gradient
has given to operations are lost on the way.
"""

from __future__ import annotations

import sys
from types import FrameType

from tensorflow.python.ops.parallel_for.control_flow_ops import pfor


def is_here() -> bool:
    """Whether what asks is called by a function that pfor traces. Relies on `pfor` being on the stack then; without it
    a gradient of a distributed model is wrong where it is taken inside tf.vectorized_map and differentiated again.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not pfor.__code__:
        frame = frame.f_back
    return frame is not None
