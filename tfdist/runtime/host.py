"""Values of variables in host memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf


def host_view(variable: tf.Variable | tf.Tensor) -> np.ndarray:
    """The value of a variable or tensor, for reading at once: without a copy where it is in host memory already."""
    try:
        tensor: Any = tf.convert_to_tensor(variable)  # whose types do not tell that it has a buffer
        return np.asarray(memoryview(tensor))
    except (
        TypeError,
        ValueError,
        BufferError,
        RuntimeError,
        NotImplementedError,
    ):  # other devices; dtypes that NumPy does not know
        return np.asarray(variable.numpy())


def known_dims(shape: tf.TensorShape) -> list[int]:
    """The dims of a shape that is fully defined."""
    dims: Any = shape.as_list()
    return dims
