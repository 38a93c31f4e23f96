"""Values in the host's memory, and operations that no GPU has a kernel for; and whose a device is."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

HOST = "CPU:0"


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


def on_host() -> AbstractContextManager:
    """A context that places operations on this worker's CPU: operations without a kernel for GPUs (TensorFlow's
    clock, Python functions), and small results that the host reads. Without it they would be errors on a GPU."""
    return tf.device(HOST)


def own_devices(kind: str) -> list[str]:
    """Names of the devices of this process ("GPU" or "CPU"), as TensorFlow wants them. In a cluster that
    MultiWorkerMirroredStrategy has started it lists those of all workers.
    """
    worker = tf.constant(0.0).device.rpartition("/device:")[0]  # "/job:worker/replica:0/task:1"
    devices = [device.name for device in tf.config.list_logical_devices(kind)]
    return [name for name in devices if "/job:" not in name or name.startswith(f"{worker}/")]


def first_gpu() -> list[str]:
    """The name of this process' first GPU; none where TensorFlow lists the other workers' devices, too."""
    own_gpus = [gpu.name for gpu in tf.config.list_logical_devices("GPU") if "/job:" not in gpu.name]
    return own_gpus[:1]


def onto_gpu(tensor: tf.Tensor) -> tf.Tensor:
    """A copy on the GPU; of int32 the tensor itself: TensorFlow's copy would be in the host's memory, and if it comes
    from the GPU wait for all that this was given before."""
    return tensor if tensor.dtype == tf.int32 else tf.identity(tensor)


def as_list(results: Any) -> list:
    """The results of `tf.numpy_function` and functions with a custom gradient as a list: they return none for one
    tensor (the first only outside of a graph)."""
    return list(results) if isinstance(results, (list, tuple)) else [results]


def timestamp() -> tf.Tensor:
    """float64 []: Unix seconds, by TensorFlow's clock, of which there is none on GPUs."""
    with on_host():
        return tf.timestamp()
