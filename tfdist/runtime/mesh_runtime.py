"""The mesh as a Runtime: one process is one coordinate of named axes (mesh.py), with a Group per axis or set of axes.

MultiWorkerMirroredStrategy starts the cluster, watches its health, and exchanges data between steps. It takes no part
inside a step: variables are plain variables, `run` is a plain call, and sums go over the groups. So ranks along `model`
and `pipe` may hold different variables, which no tf.distribute strategy allows.

A replica is a coordinate of the data and expert axes; all ranks of a replica read the same samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeGuard

import numpy as np
import tensorflow as tf

from tfdist.config import Config
from tfdist.config.mesh_degrees import AXES
from tfdist.control.cluster import Cluster
from tfdist.runtime.base import Runtime
from tfdist.runtime.collectives import Group
from tfdist.runtime.first_values import chiefs_first_values
from tfdist.runtime.hierarchical import HierarchicalGroup, check_hosts
from tfdist.runtime.mesh import REPLICA_AXES, Mesh
from tfdist.runtime.multi_worker import MultiWorker
from tfdist.runtime.operations import Collective, of_group
from tfdist.runtime.single_replica import SingleReplica


class MeshRuntime(SingleReplica):
    """A runtime whose workers form a mesh, see runtime/base.py."""

    name = "mesh"
    mesh: Mesh
    holds_whole_model = False
    compiles_updates = False  # they contain collectives
    sums_slices = False

    def __init__(self, mesh: Mesh, cluster: Cluster, world: MultiWorker, timeout: float):
        self.mesh, self._cluster, self._world, self._timeout = mesh, cluster, world, timeout
        self.rank, self.size = world.rank, world.size
        self.coordinates = mesh.coordinates(self.rank)
        self.replicas, self.first_replica = mesh.replicas, mesh.index(self.rank, *REPLICA_AXES)
        self.counts_samples = not any(self.coordinates[axis] for axis in AXES if axis not in REPLICA_AXES)
        self._groups: dict[tuple[int, ...], Group] = {}

    @classmethod
    def create(cls, config: Config, cluster: Cluster) -> MeshRuntime:
        """Raises ConfigError if --mesh does not fit the number of workers."""
        mesh = Mesh.parse(config.parallel.mesh, cluster.size)
        return cls(mesh, cluster, MultiWorker.create(config, cluster), config.strategy.collective_timeout)

    def group(self, *axes: str) -> Group:
        """The group of this rank along these axes; without axes: itself. The first call for an axis is collective."""
        return self.group_of(self.mesh.group(self.rank, *axes))

    def group_of(self, ranks: Sequence[int]) -> Group:
        """The group of the given ranks, which include this worker. Returns the same object for the same ranks."""
        ranks = tuple(ranks)
        if ranks not in self._groups:
            tasks = [self._cluster.task(rank) if self.size > 1 else "" for rank in ranks]
            self._groups[ranks] = Group(ranks, self.rank, tasks=tasks, nccl=self._world.uses_nccl)
            self._groups[ranks].meet(self._timeout)
        return self._groups[ranks]

    def for_copies(self, group: Group) -> Group:
        """The group, for sums of which workers outside of it make copies: from the same numbers, the same bits."""
        return group if group.size == self.size else group.in_order

    def hierarchical(self, group: Group, workers_per_host: int, stages: Collection[int] = ()) -> HierarchicalGroup:
        """Returns the two-level all-reduce of `group`. workers_per_host: see the flag. stages: the pipeline stages that
        hold the weights whose gradients it sums. A collective call.

        Raises: ConfigError if a group has different numbers of members on its hosts, or if groups whose sums must be
          the same, bit for bit, are spread over hosts in different ways.
        """
        if workers_per_host:
            hosts = [f"host {rank // workers_per_host}" for rank in range(self.size)]
        else:
            hosts = [address.rpartition(":")[0] for address in self._cluster.peers] or [""]

        def group_of(ranks: Sequence[int]) -> Group:
            return self.group_of(ranks).in_order if group.adds_in_order else self.group_of(ranks)

        along = [axis for axis in AXES if len({self.mesh.coordinates(rank)[axis] for rank in group.ranks}) > 1]
        groups = self.mesh.groups(*along)
        of_stages = [ranks for ranks in groups if self.mesh.coordinates(ranks[0])["pipe"] in stages]
        check_hosts(groups, of_stages if group.adds_in_order else [], hosts)
        return HierarchicalGroup(group.ranks, self.rank, hosts, group_of)

    def collectives(self) -> dict[str, Collective]:
        return of_group(self.group_of(range(self.size)))

    # -- inside a tf.function --------------------------------------------------------------------------------------

    def scope(self) -> contextlib.AbstractContextManager:
        """Context manager in which all ranks must create the same variables; they cut them afterwards."""
        return chiefs_first_values(self)

    def run(self, fn: Callable, args: Sequence = ()) -> Any:
        with _Replica(self.for_copies(self.group(*REPLICA_AXES))) if self.replicas > 1 else contextlib.nullcontext():
            return self._world.watched(lambda fn, args: fn(*args), fn, args)

    def all_reduce(self, tensors: Sequence[Any]) -> list[Any]:
        group = self.for_copies(self.group(*REPLICA_AXES))
        return [group.all_reduce(tensor) for tensor in tensors]

    def gather_row(self, row: tf.Tensor) -> tf.Tensor:
        return self.group(*REPLICA_AXES).all_gather(row[tf.newaxis])

    # -- between steps ---------------------------------------------------------------------------------------------

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        return self._world.all_gather(array)

    def broadcast(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        return self._world.broadcast(arrays)

    def barrier(self) -> None:
        self._world.barrier()

    def close(self) -> None:
        self._world.close()


def on_mesh(runtime: Runtime) -> TypeGuard[MeshRuntime]:
    """Whether parts of a model can be spread over the runtime's axes."""
    return runtime.mesh is not None


class _Replica(tf.distribute.ReplicaContext):
    """The context in which layers that communicate with other replicas themselves (BatchNormalization) find them."""

    def __init__(self, group: Group):
        super().__init__(tf.distribute.get_strategy(), 0)
        self._group = group

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        assert reduce_op == tf.distribute.ReduceOp.SUM
        return tf.nest.map_structure(self._group.all_reduce, value)
