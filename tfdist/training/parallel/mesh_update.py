"""The update on a mesh without --zero: weights are whole along `data`, and cut into parts of layers along `model`,
`pipe` and `expert`.

Gradients are summed over the replicas, `data` x `expert`. Gradients of experts that are spread over `expert` are summed
over `data` alone, because their all-to-all has already brought the samples of the other members (expert.py).

Workers along other axes may hold the same variable: ranks of `model` the norms, two stages a tied embedding. Each sums
its gradient within a group of its own, and all must get the same bits (MeshRuntime.for_copies). The same holds for the
sums and for the norm of a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import keras
import tensorflow as tf

from tfdist.config.mesh_degrees import AXES
from tfdist.runtime.collectives import Group
from tfdist.runtime.host import known_dims
from tfdist.runtime.mesh import REPLICA_AXES
from tfdist.runtime.mesh_runtime import MeshRuntime
from tfdist.training.connected import Connected, apply_connected
from tfdist.training.dtypes import at_least_float32, norm_dtype, of_each_dtype
from tfdist.training.optimizer import ema_variables, swapped_in
from tfdist.training.parallel.buckets import Bucket, make_buckets
from tfdist.training.parallel.compression import Compression
from tfdist.training.parallel.shards import build_optimizer, empty_like
from tfdist.training.update import DataParallel


class AllReduce(Protocol):
    """Sums tensors over a group: the group itself, or the object of runtime/hierarchical.py."""

    def all_reduce(self, x: tf.Tensor) -> tf.Tensor: ...


@dataclass(frozen=True)
class Placement:
    """Where the trainable variables of a model are on the mesh; by default each worker has all of each variable.

    parts: id of a variable -> the axis along which this worker has a part of it, `model` or `expert`; variables that
    are not listed are the same on all ranks of these axes.
    summed_over_model: ids of variables whose gradients differ between the ranks of `model` and must be summed over them
    (sequence.py).
    stages: id of any variable of the model -> the pipeline stages that hold it; empty without a pipeline.
    """

    parts: Mapping[int, str] = field(default_factory=dict)
    summed_over_model: frozenset[int] = frozenset()
    stages: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def axes_of_sum(self, variable: keras.Variable) -> tuple[str, ...]:
        """The axes over which the variable's gradient is summed."""
        if self.parts.get(id(variable)) == "expert":
            return ("data",)
        return (*REPLICA_AXES, "model") if id(variable) in self.summed_over_model else REPLICA_AXES


class MeshUpdate(DataParallel):
    """The update on a mesh without --zero, see training/update.py. Builds the optimizer, which must not be built yet.

    Args:
      bucket_bytes: gradients travel in buckets of about this size. 0: each gradient travels on its own.
      compression: how gradients are compressed (compression.py), once compression_after steps have been made.
      summed_over: returns, for a group and the stages with its weights, the object that sums large tensors over it.
    """

    runtime: MeshRuntime
    sharded_axes: tuple[str, ...] = ("pipe", "expert", "model")  # axes along which workers hold different pieces

    def __init__(
        self,
        runtime: MeshRuntime,
        model: keras.Model,
        optimizer: keras.Optimizer,
        placement: Placement | None = None,
        bucket_bytes: int = 2**20,
        compression: str = "none",
        compression_after: int = 0,
        summed_over: Callable[[Group, Collection[int]], AllReduce] = lambda group, stages: group,
    ):
        super().__init__(runtime, model, optimizer)
        self.all = list(model.trainable_variables)
        placement = placement or Placement()
        self.stages = placement.stages or {id(variable): (0,) for variable in self.all}
        stage = runtime.coordinates["pipe"]
        self.trainable = [variable for variable in self.all if stage in self.stages[id(variable)]]
        self.connected = Connected(self.trainable)
        self.replicas = runtime.for_copies(runtime.group(*REPLICA_AXES))
        sums = [placement.axes_of_sum(variable) for variable in self.trainable]
        self.groups = [  # over which each gradient is summed
            self._group_of_sum(variable, placement.parts.get(id(variable)), axes)
            for variable, axes in zip(self.trainable, sums, strict=True)
        ]
        stages: dict[Group, set[int]] = {}
        for variable, group in zip(self.trainable, self.groups, strict=True):
            stages.setdefault(group, set()).update(self.stages[id(variable)])
        self._sums = {group: summed_over(group, those) for group, those in stages.items()}
        self.buckets = make_buckets(self.trainable, self.groups, bucket_bytes // 4)
        self._copies = [
            self._count_copies(variable, placement.parts.get(id(variable)), axes)
            for variable, axes in zip(self.trainable, sums, strict=True)
        ]
        # GPUs add up in another order each time, so that ranks of `model` get different gradients from equal numbers.
        self._model_ranks = runtime.group("model")
        differ = bool(tf.config.list_logical_devices("GPU")) and self._model_ranks.size > 1
        self._to_be_alike = [
            place
            for place, (variable, axes) in enumerate(zip(self.trainable, sums, strict=True))
            if differ and "model" not in (placement.parts.get(id(variable)), *axes)
        ]
        self.compression = (
            None
            if compression == "none"
            else Compression(compression, self.trainable, self.replicas, compression_after)
        )
        self.build()

    def _group_of_sum(self, variable: keras.Variable, part: str | None, summed: Sequence[str]) -> Group:
        """The group that sums the variable's gradient over the axes `summed`. part: see Placement."""
        group = self.runtime.group(*summed)
        others = self.runtime.mesh.degree(*(axis for axis in AXES if axis not in {"pipe", part, *summed}))
        has_copies = others * len(self.stages[id(variable)]) > 1  # on workers outside of the group
        return self.runtime.for_copies(group) if has_copies else group

    def _count_copies(self, variable: keras.Variable, part: str | None, summed: Sequence[str]) -> int:
        """Returns how many workers of a group along `sharded_axes` hold the same piece. A part differs along one axis,
        a shard along the axes of its sum."""
        different = {"pipe", part, *(summed if self.sharded_axes == AXES else ())}
        copies = self.runtime.mesh.degree(*(axis for axis in self.sharded_axes if axis not in different))
        return copies * len(self.stages[id(variable)])

    @property
    def variables(self) -> dict[str, tf.Variable]:
        return self.compression.variables if self.compression else {}

    def figures(self) -> dict[str, float]:
        steps: Any = self.optimizer.iterations
        return self.compression.figures(int(steps)) if self.compression else {}

    @property
    def is_sharded(self) -> bool:
        """Whether the optimizer updates shards, and not the weights themselves."""
        return self.optimized is not self.trainable

    def build(self) -> None:
        """Makes the shards, if any, and the optimizer's slots."""
        self.optimized = self.trainable  # what the optimizer updates
        self.owners = self.build_optimizer()  # id of a slot -> number of its variable in `all`

    def build_optimizer(self) -> dict[int, int]:
        """Builds the optimizer on the shards, with an empty variable in place of each variable of other stages: so
        slots have the same positions on all stages."""
        held = dict(zip(map(id, self.trainable), self.optimized, strict=True))
        return build_optimizer(
            self.optimizer,
            [held[id(variable)] if id(variable) in held else empty_like(variable) for variable in self.all],
        )

    def sources(self) -> list[tf.Variable]:
        return [variable.value for variable in self.trainable]

    def pieces_of_weights(self) -> list[keras.Variable]:
        return self.optimized if self.is_sharded else []

    def averages(self) -> list[keras.Variable]:
        """The moving averages of the variables that the optimizer updates; empty without --ema."""
        numbers = {id(variable): number for number, variable in enumerate(self.all)}
        every = ema_variables(self.optimizer)
        return [every[numbers[id(variable)]] for variable in self.trainable] if every else []

    def averaged(self) -> AbstractContextManager:
        averages = self.averages()
        return swapped_in(self.trainable, averages) if averages else contextlib.nullcontext()

    def apply(self, pieces: list[tf.Tensor]) -> None:
        apply_connected(self.optimizer, self.connected.only(pieces), self.optimized)
        if self.compression:  # not earlier: the step may be skipped
            self.compression.keep(self._compression_ends)

    def storage_variables(self) -> dict[int, keras.Variable]:
        """id of a trainable variable of the model -> the variable that the model computes with, where they differ."""
        return {}

    def refresh_shards(self) -> None:
        """Sets the variables that the optimizer updates from the model's variables, after a restore."""

    def reduce(self, kept: list[tf.Tensor], sums: tf.Tensor, signals: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        everyone = self.runtime.group(*AXES)
        if everyone.size == self.replicas.size:
            scalars = everyone.all_reduce(tf.concat([sums, signals], 0))
        else:
            scalars = tf.concat([self.replicas.all_reduce(sums), everyone.all_reduce(signals)], 0)
        return self.reduce_gradients(self._alike(kept)), scalars

    def _alike(self, kept: list[tf.Tensor]) -> list[tf.Tensor]:
        """Gives all ranks of `model` the first rank's gradients of the variables that all of them hold whole."""
        alike = of_each_dtype(self._of_first_rank, [kept[place] for place in self._to_be_alike])
        pieces = dict(enumerate(kept)) | dict(zip(self._to_be_alike, alike, strict=True))
        return [pieces[place] for place in range(len(kept))]

    def _of_first_rank(self, tensors: Sequence[tf.Tensor], places: Sequence[int]) -> list[tf.Tensor]:
        group, shapes = self._model_ranks, tuple(tuple(known_dims(tensor.shape)) for tensor in tensors)

        def first(own: tf.Tensor) -> tf.Tensor:
            return group.all_reduce(own if group.index == 0 else tf.zeros_like(own))

        return Bucket(tuple(places), shapes, group).all_reduce(tensors, first)

    def reduce_gradients(self, kept: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums gradients over the replicas; returns this worker's pieces."""
        compression = self.compression
        if not compression:
            return self._summed_whole(kept)
        if compression.after:
            step: Any = self.optimizer.iterations
            pieces, self._compression_ends = tf.cond(
                step < compression.after,
                lambda: (self._summed_whole(kept), compression.unchanged()),
                lambda: compression(kept),
            )
        else:
            pieces, self._compression_ends = compression(kept)
        return pieces

    def _summed_whole(self, kept: list[tf.Tensor]) -> list[tf.Tensor]:
        pieces: dict[int, tf.Tensor] = {}
        for bucket in self.buckets:
            bucket.put(bucket.all_reduce(bucket.take(kept), self._sums[bucket.group].all_reduce), pieces)
        return [pieces[place] for place in range(len(kept))]

    def norm(self, pieces: Sequence[tf.Tensor]) -> tf.Tensor:
        dtype = norm_dtype(self.all)  # not only this stage's variables: all sharded_axes must add up in the same dtype
        squares = [
            tf.cast(tf.reduce_sum(tf.square(tf.convert_to_tensor(at_least_float32(piece)))) / copies, dtype)
            for piece, copies in zip(map(tf.convert_to_tensor, pieces), self._copies, strict=True)
        ]
        own_square = tf.add_n([tf.zeros([], dtype), *squares])  # a stage may have no trainable weights
        group = self.runtime.for_copies(self.runtime.group(*self.sharded_axes))
        return tf.cast(tf.sqrt(group.all_reduce(own_square)), tf.float32)

    def weight_norm(self) -> tf.Tensor:
        return self.norm(self.sources())
