"""Makes TensorFlow's devices, for which there is no public name (TensorFlow 2.21)."""

from __future__ import annotations

from typing import Any

from tensorflow.core.protobuf import config_pb2
from tensorflow.python.eager import context


def pin_host_memory() -> None:
    """Lets GPUs read tensors in the host's memory by themselves. To be called before TensorFlow makes its devices.

    Relies on `Context._config`, of which TensorFlow makes its devices; without it a batch is copied to a GPU at a third
    of the speed, and while that goes on nothing can be launched there.
    """
    this: Any = context.context()
    config = getattr(this, "_config", None) or config_pb2.ConfigProto()
    config.gpu_options.force_gpu_compatible = True
    this._config = config
