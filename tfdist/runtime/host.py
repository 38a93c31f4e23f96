"""Reads values in host memory, places operations that have no GPU kernel, and finds this process's devices."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

HOST = "CPU:0"


def host_view(variable: tf.Variable | tf.Tensor) -> np.ndarray:
    """The value of a variable or tensor, to be read at once: not copied if it is in host memory already."""
    try:
        tensor: Any = tf.convert_to_tensor(variable)  # TensorFlow's types do not declare its buffer
        return np.asarray(memoryview(tensor))
    except (
        TypeError,
        ValueError,
        BufferError,
        RuntimeError,
        NotImplementedError,
    ):  # other devices; dtypes that NumPy does not know
        return np.asarray(variable.numpy(), variable.dtype.as_numpy_dtype)  # a single string comes as bytes


def known_dims(shape: tf.TensorShape) -> list[int]:
    """The dims of a shape that is fully defined."""
    dims: Any = shape.as_list()
    return dims


def on_host() -> AbstractContextManager:
    """Context manager that places operations on this worker's CPU: operations without a GPU kernel (TensorFlow's clock,
    Python functions), and small results that the host reads. On a GPU they would be errors."""
    return tf.device(HOST)


def own_devices(kind: str) -> list[str]:
    """Returns the names of this process's devices ("GPU" or "CPU"), as TensorFlow expects them. In a cluster that
    MultiWorkerMirroredStrategy has started TensorFlow lists the devices of all workers.
    """
    worker = tf.constant(0.0).device.rpartition("/device:")[0]  # "/job:worker/replica:0/task:1"
    devices = [device.name for device in tf.config.list_logical_devices(kind)]
    return [name for name in devices if "/job:" not in name or name.startswith(f"{worker}/")]


def first_gpu() -> list[str]:
    """The name of this process's first GPU; empty where TensorFlow also lists the other workers' devices."""
    own_gpus = [gpu.name for gpu in tf.config.list_logical_devices("GPU") if "/job:" not in gpu.name]
    return own_gpus[:1]


def onto_gpu(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a copy on the GPU, but an int32 tensor itself: TensorFlow would copy it to host memory, and, if it comes
    from the GPU, wait for all earlier work of the GPU."""
    return tensor if tensor.dtype == tf.int32 else tf.identity(tensor)


def as_list(results: Any) -> list:
    """The results of `tf.numpy_function` and of functions with a custom gradient as a list: for a single tensor they
    return no list (the former only outside of a graph)."""
    return list(results) if isinstance(results, (list, tuple)) else [results]


def timestamp() -> tf.Tensor:
    """float64 []: Unix seconds, from TensorFlow's clock, which does not exist on GPUs."""
    with on_host():
        return tf.timestamp()
