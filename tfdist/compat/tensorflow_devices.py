"""A setting of TensorFlow's devices that has no public name (TensorFlow 2.21)."""

from __future__ import annotations

from typing import Any

from tensorflow.core.protobuf import config_pb2
from tensorflow.python.eager import context


def pin_host_memory() -> None:
    """Lets GPUs read tensors in host memory directly. Call it before TensorFlow creates its devices.

    Relies on `Context._config`, from which TensorFlow creates its devices; without it a batch is copied to a GPU at a
    third of the speed, and nothing can be launched there during the copy.
    """
    this: Any = context.context()
    config = getattr(this, "_config", None) or config_pb2.ConfigProto()
    config.gpu_options.force_gpu_compatible = True
    this._config = config
