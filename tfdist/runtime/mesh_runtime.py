"""The mesh as a Runtime: one process is one coordinate of named axes (mesh.py), with a Group per axis or set of axes.

MultiWorkerMirroredStrategy starts the cluster, watches its health, and carries what is exchanged between steps. Inside
a step it takes no part: variables are plain ones, `run` is a plain call, and sums go over the groups. So ranks along
`model` and `pipe` may hold different variables, which no tf.distribute strategy allows.

A replica is a coordinate of the data and expert axes; all ranks of a replica read the same samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.runtime.collectives import Group
from tfdist.runtime.mesh import AXES, REPLICA_AXES, Mesh
from tfdist.runtime.mirrored import MultiWorker


class MeshRuntime:
    """See runtime/base.py."""

    name = "mesh"
    local_replicas = 1

    def __init__(self, mesh: Mesh, cluster: Cluster, world: MultiWorker, timeout: float):
        self.mesh, self._cluster, self._world, self._timeout = mesh, cluster, world, timeout
        self.rank, self.size = world.rank, world.size
        self.coordinates = mesh.coordinates(self.rank)
        self.replicas, self.first_replica = mesh.replicas, mesh.index(self.rank, *REPLICA_AXES)
        self.leads = not any(self.coordinates[axis] for axis in AXES if axis not in REPLICA_AXES)
        self._nccl = bool(tf.config.list_logical_devices("GPU"))
        self._groups: dict[tuple[str, ...], Group] = {}

    @classmethod
    def create(cls, config: Config, cluster: Cluster) -> MeshRuntime:
        """Raises ConfigError if --mesh does not fit the number of workers."""
        mesh = Mesh.parse(config.parallel.mesh, cluster.size)
        return cls(mesh, cluster, MultiWorker.create(config, cluster), config.strategy.collective_timeout)

    def group(self, *axes: str) -> Group:
        """The group of this rank along some axes; none: itself alone. The same object for the same axes."""
        axes = tuple(axis for axis in AXES if axis in axes)
        if axes not in self._groups:
            self._groups[axes] = self.group_of(self.mesh.group(self.rank, *axes))
        return self._groups[axes]

    def group_of(self, ranks: Sequence[int], salt: str = "") -> Group:
        """A group of any ranks, of which this worker is one."""
        tasks = [self._cluster.task(rank) if self.size > 1 else "" for rank in ranks]
        return Group(ranks, self.rank, tasks=tasks, timeout=self._timeout, nccl=self._nccl, salt=salt)

    # -- inside a tf.function --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Variables get the chief's initial values, so all ranks must create the same ones here, and cut them afterwards."""
        def creator(create: Callable, **arguments: Any) -> tf.Variable:
            value = arguments["initial_value"]
            value = tf.convert_to_tensor(value() if callable(value) else value, dtype=arguments.get("dtype"))
            (arguments["initial_value"],) = self.broadcast([value.numpy()])
            return create(**arguments)

        with contextlib.nullcontext() if self.size == 1 else tf.variable_creator_scope(creator):
            yield

    def run(self, fn: Callable, args: Sequence = ()) -> Any:
        with _Replica(self.group(*REPLICA_AXES)) if self.replicas > 1 else contextlib.nullcontext():
            return fn(*args)

    def per_replica(self, values: Sequence) -> Any:
        (value,) = values
        return value

    def local(self, value: Any) -> tuple:
        return (value,)

    def replica_id(self) -> tf.Tensor:
        return tf.constant(self.first_replica)

    def all_reduce(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return [self.group(*REPLICA_AXES).all_reduce(tensor) for tensor in tensors]

    # -- between steps ---------------------------------------------------------------------------------------------

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        return self._world.all_gather(array)

    def broadcast(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        return self._world.broadcast(arrays)

    def barrier(self) -> None:
        self._world.barrier()

    def waiting_for(self) -> int | None:
        return None  # TensorFlow's collectives do not tell

    def close(self) -> None:
        self._world.close()


class _Replica(tf.distribute.ReplicaContext):
    """Where layers that speak to other replicas by themselves (BatchNormalization) find them."""

    def __init__(self, group: Group):
        super().__init__(tf.distribute.get_strategy(), 0)
        self._group = group

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        assert reduce_op == tf.distribute.ReduceOp.SUM
        return tf.nest.map_structure(self._group.all_reduce, value)
