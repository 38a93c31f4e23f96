"""Synchronous data parallelism through Horovod: one replica per process, gradients summed by its background threads.

Horovod's Keras wrappers are not used: with Keras 3 its DistributedOptimizer silently reduces nothing. Its collectives
on TensorFlow's tensors work. Installed by scripts/install_horovod.sh.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.runtime import horovod_start
from tfdist.runtime.array_bytes import from_bytes, to_bytes
from tfdist.runtime.bucketing import in_buckets
from tfdist.runtime.first_values import chiefs_first_values
from tfdist.runtime.host import known_dims
from tfdist.runtime.operations import Collective
from tfdist.runtime.own_gradient import with_gradient
from tfdist.runtime.single_replica import SingleReplica

_CHUNK = 1 << 26  # bytes per host collective, to bound its memory
# Elements: smaller tensors gain nothing, and the step's sums of weights would exceed float16's range.
_LEAST_COMPRESSED = 1024


class Horovod(SingleReplica):
    """A runtime over Horovod's collectives, see runtime/base.py."""

    name = "horovod"

    def __init__(self, hvd: ModuleType, group_bytes: int, compress: bool):
        self._hvd = hvd
        self._group_bytes, self._compress = group_bytes, compress
        self.rank = self.first_replica = hvd.rank()
        self.size = self.replicas = hvd.size()

    @classmethod
    def create(cls, config: Config, cluster: Cluster) -> Horovod:
        hvd, place = horovod_start.start(cluster, config)
        gpus = tf.config.get_visible_devices("GPU")
        if len(gpus) > 1:  # no GPU chosen yet
            tf.config.set_visible_devices(gpus[place.local_rank % len(gpus)], "GPU")
        return cls(hvd, int(config.strategy.horovod_fusion_mb * 2**20), config.strategy.horovod_compression == "fp16")

    def scope(self) -> contextlib.AbstractContextManager:
        return chiefs_first_values(self)

    def all_reduce(self, tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[Any]:
        whole = iter(self._sum_whole([tensor for tensor in tensors if not isinstance(tensor, tf.IndexedSlices)]))
        return [self._gathered(tensor) if isinstance(tensor, tf.IndexedSlices) else next(whole) for tensor in tensors]

    def _sum_whole(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums tensors; they travel as float16 where that is requested and worthwhile."""
        halved = [
            self._compress and tensor.dtype == tf.float32 and math.prod(known_dims(tensor.shape)) >= _LEAST_COMPRESSED
            for tensor in tensors
        ]
        reduced = self._sum(
            [tf.cast(tensor, tf.float16) if half else tensor for tensor, half in zip(tensors, halved, strict=True)]
        )
        return [tf.cast(tensor, tf.float32) if half else tensor for tensor, half in zip(reduced, halved, strict=True)]

    def _gathered(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        if self.size == 1:
            return slices
        return tf.IndexedSlices(
            self._hvd.allgather(slices.values), self._hvd.allgather(slices.indices), slices.dense_shape
        )

    def _sum(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums tensors in groups of one dtype: Horovod starts a group when all of it is ready on all ranks."""
        if self.size == 1:
            return list(tensors)
        reduced: list = [None] * len(tensors)
        sizes = [math.prod(known_dims(tensor.shape)) * tensor.dtype.size for tensor in tensors]
        for members in in_buckets(sizes, self._group_bytes, [tensor.dtype for tensor in tensors]):
            # Horovod does not support bfloat16.
            group = [
                tf.cast(tensors[index], tf.float32) if tensors[index].dtype == tf.bfloat16 else tensors[index]
                for index in members
            ]
            for index, value in zip(members, self._hvd.grouped_allreduce(group, op=self._hvd.Sum), strict=True):
                reduced[index] = tf.cast(tf.ensure_shape(value, tensors[index].shape), tensors[index].dtype)
        return reduced

    def gather_row(self, row: tf.Tensor) -> tf.Tensor:
        if self.size == 1:
            return row[tf.newaxis]
        # Horovod's own gradient of allgather is a mean over ranks.
        return with_gradient(
            lambda row: tf.ensure_shape(self._hvd.allgather(row[tf.newaxis]), [self.size, row.shape[0]]),
            lambda upstream: self._sum([upstream])[0][self.rank],
            row,
        )

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        array = np.asarray(array)
        if self.size == 1:
            return array[np.newaxis]
        data = np.frombuffer(to_bytes([array]), np.uint8)
        gathered = (
            np.concatenate(
                [
                    self._hvd.allgather(
                        tf.constant(data[np.newaxis, start : start + _CHUNK]), name="tfdist_all_gather"
                    ).numpy()
                    for start in range(0, max(data.size, 1), _CHUNK)
                ],
                axis=1,
            )
            if data.size
            else np.zeros([self.size, 0], np.uint8)
        )
        return np.stack([from_bytes(row.tobytes(), [array])[0] for row in gathered])

    def broadcast(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        data = np.frombuffer(to_bytes(arrays), np.uint8)
        if self.size == 1 or not data.size:
            return [np.asarray(array) for array in arrays]
        chunks = [
            self._hvd.broadcast(tf.constant(data[start : start + _CHUNK]), 0, name="tfdist_broadcast").numpy()
            for start in range(0, data.size, _CHUNK)
        ]
        return from_bytes(np.concatenate(chunks).tobytes(), arrays)

    def barrier(self) -> None:
        self.all_gather(np.zeros(1, np.uint8))

    def collectives(self) -> dict[str, Collective]:
        hvd = self._hvd
        nccl = hvd.nccl_built() and tf.config.list_logical_devices("GPU")
        through = "Horovod, NCCL" if nccl else "Horovod, Gloo" if hvd.gloo_enabled() else "Horovod, MPI"
        return {
            "all_reduce": Collective(through, lambda x: self.all_reduce([x])[0]),
            "all_gather": Collective(through, hvd.allgather),
            "reduce_scatter": Collective(through, lambda x: hvd.reducescatter(x, op=hvd.Sum)),
            "all_to_all": Collective(through, hvd.alltoall),
            "broadcast": Collective(through, lambda x: hvd.broadcast(x, 0)),
        }

    def close(self) -> None:
        self._hvd.shutdown()
