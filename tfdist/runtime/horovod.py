"""Synchronous data parallelism through Horovod: one replica per process, gradients summed by its background threads.

Horovod's Keras wrappers are not used: with Keras 3 its DistributedOptimizer reduces nothing, without a word. Its
collectives work, on TensorFlow's own tensors. Installed by scripts/install_horovod.sh.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.runtime import horovod_start
from tfdist.runtime.defaults import RuntimeDefaults
from tfdist.runtime.operations import Collective

_CHUNK = 1 << 26  # bytes per host collective, to bound its memory
_LEAST_COMPRESSED = (
    1024  # elements: smaller tensors gain nothing, and the step's sums of weights exceed float16's range
)


class Horovod(RuntimeDefaults):
    """See runtime/base.py."""

    name = "horovod"
    local_replicas = 1

    def __init__(self, hvd: ModuleType, group_bytes: int = 1 << 26, compress: bool = False):
        self._hvd = hvd
        self._group_bytes, self._compress = group_bytes, compress
        self.rank = self.first_replica = hvd.rank()
        self.size = self.replicas = hvd.size()

    @classmethod
    def create(cls, config: Config, cluster: Cluster) -> Horovod:
        hvd, place = horovod_start.start(cluster, config)
        gpus = tf.config.get_visible_devices("GPU")
        if len(gpus) > 1:  # not chosen yet
            tf.config.set_visible_devices(gpus[place.local_rank % len(gpus)], "GPU")
        return cls(hvd, int(config.strategy.horovod_fusion_mb * 2**20), config.strategy.horovod_compression == "fp16")

    def scope(self) -> contextlib.AbstractContextManager:
        def create_variable(next_creator: Callable, **arguments: Any) -> tf.Variable:
            variable = next_creator(**arguments)
            if self.size > 1:
                variable.assign(self.broadcast([variable.numpy()])[0])
            return variable

        return tf.variable_creator_scope(create_variable)

    def run(self, fn: Callable, args: Sequence = ()) -> Any:
        return fn(*args)

    def per_replica(self, values: Sequence) -> Any:
        (value,) = values
        return value

    def local(self, value: Any) -> tuple:
        return (value,)

    def replica_id(self) -> tf.Tensor:
        return tf.constant(self.rank)

    def all_reduce(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        if any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
            whole = iter(self.all_reduce([tensor for tensor in tensors if not isinstance(tensor, tf.IndexedSlices)]))
            return [
                self._gathered(tensor) if isinstance(tensor, tf.IndexedSlices) else next(whole) for tensor in tensors
            ]
        small = [
            self._compress and tensor.dtype == tf.float32 and tensor.shape.num_elements() >= _LEAST_COMPRESSED
            for tensor in tensors
        ]
        reduced = self._sum(
            [tf.cast(tensor, tf.float16) if half else tensor for tensor, half in zip(tensors, small, strict=True)]
        )
        return [tf.cast(tensor, tf.float32) if half else tensor for tensor, half in zip(reduced, small, strict=True)]

    def _gathered(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        if self.size == 1:
            return slices
        return tf.IndexedSlices(
            self._hvd.allgather(slices.values), self._hvd.allgather(slices.indices), slices.dense_shape
        )

    def _sum(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """In groups of one dtype: Horovod begins with a group when all of it is ready on all ranks."""
        if self.size == 1:
            return list(tensors)
        reduced: list = [None] * len(tensors)
        for members in _groups(tensors, self._group_bytes):
            # Horovod does not know bfloat16.
            group = [
                tf.cast(tensors[index], tf.float32) if tensors[index].dtype == tf.bfloat16 else tensors[index]
                for index in members
            ]
            for index, value in zip(members, self._hvd.grouped_allreduce(group, op=self._hvd.Sum), strict=True):
                reduced[index] = tf.cast(tf.ensure_shape(value, tensors[index].shape), tensors[index].dtype)
        return reduced

    def assign(self, variable: tf.Variable, value: tf.Tensor) -> None:
        variable.assign(value)

    def gather_row(self, row: tf.Tensor) -> tf.Tensor:
        @tf.custom_gradient
        def gathered(row: tf.Tensor):
            # Horovod's own gradient of this is a mean over ranks.
            return (
                tf.ensure_shape(self._hvd.allgather(row[tf.newaxis]), [self.size, row.shape[0]]),
                lambda upstream: self._sum([upstream])[0][self.rank],
            )

        return row[tf.newaxis] if self.size == 1 else gathered(row)

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        array = np.asarray(array)
        if self.size == 1:
            return array[np.newaxis]
        data = _to_bytes([array])
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
        return np.stack([_from_bytes(row, [array])[0] for row in gathered])

    def broadcast(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        data = _to_bytes(arrays)
        if self.size == 1 or not data.size:
            return [np.asarray(array) for array in arrays]
        chunks = [
            self._hvd.broadcast(tf.constant(data[start : start + _CHUNK]), 0, name="tfdist_broadcast").numpy()
            for start in range(0, data.size, _CHUNK)
        ]
        return _from_bytes(np.concatenate(chunks), arrays)

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


def _groups(tensors: list[tf.Tensor], most_bytes: int) -> list[list[int]]:
    """Indices of tensors of one dtype, up to about `most_bytes` a group; from the last, whose gradients are ready
    first.
    """
    groups: list[list[int]] = []
    size = 0
    for index in reversed(range(len(tensors))):
        tensor_bytes = tensors[index].shape.num_elements() * tensors[index].dtype.size
        if not groups or tensors[groups[-1][-1]].dtype != tensors[index].dtype or size + tensor_bytes > most_bytes:
            groups.append([])
            size = 0
        groups[-1].append(index)
        size += tensor_bytes
    return groups


def _to_bytes(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.frombuffer(b"".join(np.asarray(array).tobytes() for array in arrays), np.uint8)


def _from_bytes(data: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    text, offset, arrays = data.tobytes(), 0, []
    for array in map(np.asarray, like):
        arrays.append(np.frombuffer(text, array.dtype, array.size, offset).reshape(array.shape).copy())
        offset += array.nbytes
    return arrays
