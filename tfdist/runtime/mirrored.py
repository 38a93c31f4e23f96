"""Synchronous data parallelism through tf.distribute: the common base of its strategies' runtimes, and
MirroredStrategy, for the devices of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat import tensorflow_replicas
from tfdist.compat.tensorflow_replicas import per_replica
from tfdist.config import Config, StrategyConfig
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError
from tfdist.runtime.all_reduce_choice import GradientPath
from tfdist.runtime.array_bytes import from_bytes, to_bytes
from tfdist.runtime.collective_timeout import Overdue
from tfdist.runtime.defaults import RuntimeDefaults
from tfdist.runtime.reducer import RingReducer, suits

_CHUNK = 1 << 23  # words (64 MiB) per collective between steps, to bound its memory
# The dtype that carries 32 bits between steps: exact, and not handled by our ring, whose setup uses it. On GPUs
# TensorFlow neither sums int32, by NCCL or by its own ring, nor splits int64.
CARRIER = tf.float64


class StrategyRuntime(RuntimeDefaults):
    """A tf.distribute.Strategy as a Runtime; see runtime/base.py."""

    name = "tf.distribute"
    compiles_updates = False  # updates by Keras' optimizers leave the replica context

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        options: tf.distribute.experimental.CommunicationOptions,
        *,
        rank: int,
        size: int,
    ):
        self.strategy = strategy
        self.options = options
        self.rank = rank
        self.size = size
        self.replicas = strategy.num_replicas_in_sync
        self.local_replicas = self.replicas // size
        self.first_replica = rank * self.local_replicas
        self._reducer: RingReducer | None = None
        self._overdue: Overdue | None = None
        self._sum_function = tf.function(self._sum_of_first_replicas, autograph=False, reduce_retracing=True)

    def scope(self) -> AbstractContextManager:
        return self.strategy.scope()

    def run(self, fn: Callable, args: Sequence = ()) -> Any:
        return self.watched(self.strategy.run, fn, args)

    def batch_devices(self) -> Sequence[str]:
        return [device for device in self.strategy.extended.worker_devices if "GPU" in device]

    def order_tokens(self) -> Sequence[tf.Variable]:
        return tensorflow_replicas.order_tokens(self.strategy)

    def watched(self, run: Callable, fn: Callable, args: Sequence) -> Any:
        """Returns `run(fn, args)`, watched for collectives that do not end, if such a watch is set."""
        return self._overdue.watched(run, fn, args) if self._overdue else run(fn, tuple(args))

    def per_replica(self, values: Sequence) -> Any:
        if len(values) == 1:
            return values[0]
        return tf.nest.map_structure(lambda *leaves: per_replica(leaves), *values)

    def local(self, value: Any) -> tuple:
        if self.local_replicas == 1:
            return (value,)
        leaves = [self.strategy.experimental_local_results(leaf) for leaf in tf.nest.flatten(value)]
        return tuple(
            tf.nest.pack_sequence_as(value, [leaf[index] for leaf in leaves]) for index in range(self.local_replicas)
        )

    def replica_id(self) -> tf.Tensor:
        return tf.convert_to_tensor(tf.distribute.get_replica_context().replica_id_in_sync_group)

    def all_reduce(self, tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[Any]:
        if self._reducer and all(suits(tensor) for tensor in tensors):
            return self._reducer(tensors)
        reduced: list = [None] * len(tensors)
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):  # all_reduce joins tensors of one dtype only
            places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
            # Arguments of `run` that pass straight through fail with "destinations can not be empty" without the
            # identity.
            sums = tf.distribute.get_replica_context().all_reduce(
                tf.distribute.ReduceOp.SUM,
                [_with_short_indices(tf.identity(tensors[place])) for place in places],
                options=self.options,
            )
            for place, total in zip(places, sums, strict=True):
                reduced[place] = _with_indices_of(tensors[place], total)
        return reduced

    def assign(self, variable: tf.Variable, value: Any) -> None:
        # `variable.assign` inside `run` would combine the replicas' values by the variable's aggregation.
        if isinstance(variable, tf.distribute.DistributedValues):
            self.strategy.extended.update(variable, lambda copy, new: copy.assign(new), args=(value,))
        else:
            variable.assign(self.local(value)[0])

    def gather_row(self, row: tf.Tensor) -> tf.Tensor:
        # Each replica adds its row to zeros. Not through the ring, which expects the order of the backward pass.
        replica = tf.distribute.get_replica_context()
        placed = tf.scatter_nd([[self.replica_id()]], row[tf.newaxis], [self.replicas, row.shape[0]])
        return replica.all_reduce(tf.distribute.ReduceOp.SUM, placed)

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        array = np.asarray(array)
        words = to_words([array])
        rows = np.zeros((self.size, words.size), np.uint32)
        rows[self.rank] = words
        gathered = self._sum(rows.reshape(-1)).reshape(rows.shape)
        return np.stack([from_bytes(row.tobytes(), [array])[0] for row in gathered])

    def broadcast(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        words = to_words(arrays)
        return from_bytes(self._sum(words if self.rank == 0 else np.zeros_like(words)).tobytes(), arrays)

    def barrier(self) -> None:
        self._sum(np.zeros(1, np.uint32))

    def waiting_for(self) -> int | None:
        return self._reducer.ring.waiting_for if self._reducer else None

    def reduction_s(self) -> tuple[float, float] | None:
        return (self._reducer.travel_s, self._reducer.wait_s) if self._reducer else None

    def gradient_path(self) -> GradientPath | None:
        return self._reducer.ring.gradient_path() if self._reducer else None

    def close(self) -> None:
        pass

    def _sum(self, words: np.ndarray) -> np.ndarray:
        """Sums uint32 [n] over workers; at each place all workers but one pass zeros."""
        if self.size == 1:
            return words
        chunks = [
            self._sum_function(tf.constant(words[start : start + _CHUNK], CARRIER)).numpy().astype(np.uint32)
            for start in range(0, words.size, _CHUNK)
        ]
        return np.concatenate(chunks) if chunks else words

    def _sum_of_first_replicas(self, words: tf.Tensor) -> tf.Tensor:
        first = self.per_replica(
            [words if index == 0 else tf.zeros_like(words) for index in range(self.local_replicas)]
        )
        return self.local(self.run(lambda value: self.all_reduce([value])[0], (first,)))[0]


class Mirrored(StrategyRuntime):
    """All local GPUs, or K virtual CPU devices."""

    name = "mirrored"

    @classmethod
    def create(cls, config: Config, cluster: Cluster) -> Mirrored:
        virtual = config.strategy.virtual_devices
        if virtual:
            cpu = tf.config.list_physical_devices("CPU")[0]
            if len(tf.config.get_logical_device_configuration(cpu) or [None]) != virtual:
                tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * virtual)
            devices = [f"CPU:{index}" for index in range(virtual)]
        else:
            devices = [f"GPU:{index}" for index in range(len(tf.config.list_logical_devices("GPU")))]
            if not devices:
                raise ConfigError(
                    "--strategy=mirrored, but this machine shows no GPU: use --virtual_devices=2 to try it on the CPU,"
                    " or --strategy=one_device."
                )
        options = communication_options(config.strategy)
        strategy = tf.distribute.MirroredStrategy(devices)
        return cls(strategy, options, rank=0, size=1)


def communication_options(config: StrategyConfig) -> tf.distribute.experimental.CommunicationOptions:
    """The flags of the strategy component as TensorFlow's options; collective_timeout.py explains why no time-out is
    set.
    """
    kinds = tf.distribute.experimental.CommunicationImplementation
    return tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=int(config.pack_mb * 2**20),
        implementation={"auto": kinds.AUTO, "socket": kinds.AUTO, "ring": kinds.RING, "nccl": kinds.NCCL}[
            config.communication
        ],
    )


def to_words(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The bytes of all arrays as uint32 [n], padded with zeros."""
    data = to_bytes(arrays)
    return np.frombuffer(data + bytes(-len(data) % 4), np.uint32)


def _with_short_indices(tensor: Any) -> Any:
    """Casts the indices of slices to int32 if the table has fewer than 2^31 rows: TensorFlow pads the indices of a
    single replica, and cannot pad int64 on GPUs."""
    rows = tensor.shape[0] if isinstance(tensor, tf.IndexedSlices) else None
    if rows is None or rows >= 2**31:
        return tensor
    return tf.IndexedSlices(tensor.values, tf.cast(tensor.indices, tf.int32), tensor.dense_shape)


def _with_indices_of(like: Any, total: Any) -> Any:
    if not isinstance(total, tf.IndexedSlices):
        return total
    return tf.IndexedSlices(total.values, tf.cast(total.indices, like.indices.dtype), like.dense_shape)
