"""One replica on one device: no tf.distribute, no overhead. All other runtimes are compared with this baseline."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.runtime.host import first_gpu
from tfdist.runtime.single_replica import SingleReplica


class OneDevice(SingleReplica):
    """A runtime with one replica, see runtime/base.py."""

    name = "one_device"
    rank = 0
    size = 1
    replicas = 1
    first_replica = 0

    @classmethod
    def create(cls, config: Config, cluster: Cluster) -> OneDevice:
        return cls()

    def scope(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def batch_devices(self) -> Sequence[str]:
        return first_gpu()

    def all_reduce(self, tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[Any]:
        return list(tensors)

    def gather_row(self, row: tf.Tensor) -> tf.Tensor:
        return row[tf.newaxis]

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        return np.asarray(array)[np.newaxis]

    def broadcast(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        return arrays

    def barrier(self) -> None:
        pass

    def reduction_s(self) -> tuple[float, float] | None:
        return 0.0, 0.0

    def close(self) -> None:
        pass
