"""ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054): shards over the data axis what data parallelism holds N times.

Bytes on each of N workers for P parameters in float32 and an optimizer with s slots (SGD 0, momentum 1, Adam 2):

    --zero   parameters      gradients kept   optimizer's copy + slots   travels in a step
    0        4 P             4 P              4 s P                      all-reduce
    1        4 P             4 P              4 (1 + s) P / N            reduce-scatter, all-gather
    2        4 P             4 P / N          4 (1 + s) P / N            the same for each micro-batch
    3        4 P / N         4 P / N          4 s P / N                  half as much again as 2

A reduce-scatter and an all-gather together move as much as one all-reduce. In addition, stage 3 holds the whole
parameters of two layers at a time. The optimizer of stages 1 and 2 works on a copy of its shard of the parameters
("master weights"); the optimizer of stage 3 works on the parameter's shard itself.

A step of stages 1 and 2:  gradients -> reduce-scatter: each worker has its shard of the sum -> norm of all shards (one
number to reduce) -> clip -> the optimizer updates the worker's shards -> all-gather: all workers have all parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_layers
from tfdist.compat.tensorflow_graphs import operation_number
from tfdist.config.mesh_degrees import AXES
from tfdist.control.exit_codes import ConfigError
from tfdist.runtime.mesh_runtime import MeshRuntime
from tfdist.training.backward_order import age, made_after
from tfdist.training.connected import apply_connected
from tfdist.training.optimizer import swapped_in
from tfdist.training.parallel.assigned_weights import refuse_assigned
from tfdist.training.parallel.gathered import gather_layers
from tfdist.training.parallel.mesh_update import MeshUpdate
from tfdist.training.parallel.shards import ShardLayout, shard_variables

# Stage 2: number of gradient buckets whose shards may still be on the way. Without a limit, a backward pass that runs
# ahead of the network would have all gradients in memory.
_ON_THE_WAY = 2


class ShardedUpdate(MeshUpdate):
    """The common part of all stages: an optimizer over shards. `on_host`: whether the shards are in host memory and the
    update runs on the CPU.

    Raises: ConfigError if the optimizer is not element-wise, or a variable has a constraint.
    """

    sharded_axes = AXES

    def __init__(
        self,
        runtime: MeshRuntime,
        model: keras.Model,
        optimizer: keras.Optimizer,
        stage: int,
        on_host: bool = False,
        **options: Any,
    ):
        _check(optimizer, model, stage)
        self.stage = stage
        self._device = "/CPU:0" if on_host else None
        super().__init__(runtime, model, optimizer, **options)

    def build(self) -> None:
        with tf.device(self._device):
            self.optimized = shard_variables(self.trainable, self.groups)
            self.owners = self.build_optimizer()

    def apply(self, pieces: list[tf.Tensor]) -> None:
        with tf.device(self._device):
            apply_connected(self.optimizer, self.connected.only(pieces), self.optimized)
        self.gather_weights()

    def weight_norm(self) -> tf.Tensor:
        return self.norm([shard.value for shard in self.optimized])

    def gather_weights(self) -> None:
        """Sets the model's variables from the shards. A collective call."""

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        averages = self.averages()
        if not averages:
            yield
            return
        gather_weights = tf.function(self.gather_weights, autograph=False)
        try:
            with swapped_in(self.optimized, averages):
                gather_weights()
                yield
        finally:
            gather_weights()


class ZeroUpdate(ShardedUpdate):
    """The update of ZeRO's stages 1 and 2."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._layouts = [ShardLayout(bucket.shapes, bucket.group) for bucket in self.buckets]

    def keep(self, gradients: list[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor | tf.IndexedSlices]:
        kept = super().keep(gradients)
        return [*self._scattered([tf.convert_to_tensor(gradient) for gradient in kept])] if self.stage == 2 else kept

    def reduce_gradients(self, kept: list[tf.Tensor]) -> list[tf.Tensor]:
        return kept if self.stage == 2 else self._scattered(kept)

    def _scattered(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        pieces: dict[int, tf.Tensor] = {}
        sent: list[tuple[tf.Tensor, int]] = []
        newest = _last_collective(tf.compat.v1.get_default_graph())
        in_order = sorted(
            zip(self.buckets, self._layouts, strict=True), key=lambda each: max(map(age, each[0].take(gradients)))
        )
        for bucket, layout in in_order:
            whole = bucket.take(gradients)
            if self.stage == 2 and len(sent) >= _ON_THE_WAY:
                for gradient in whole:
                    made_after(gradient, *sent[-_ON_THE_WAY])
            scattered = layout.scatter_sum(whole)
            newest = max(newest, *map(age, whole))
            sent.append((scattered[0], newest))
            bucket.put(scattered, pieces)
        return [pieces[place] for place in range(len(gradients))]

    def gather_weights(self) -> None:
        for bucket, layout in zip(self.buckets, self._layouts, strict=True):
            whole = layout.gather([shard.value for shard in bucket.take(self.optimized)])
            for variable, value in zip(bucket.take(self.trainable), whole, strict=True):
                variable.assign(value)

    def refresh_shards(self) -> None:
        for bucket, layout in zip(self.buckets, self._layouts, strict=True):
            for number, (shard, whole) in enumerate(
                zip(bucket.take(self.optimized), bucket.take(self.trainable), strict=True)
            ):
                shard.assign(layout.cut(whole.numpy(), number))


class Zero3Update(ShardedUpdate):
    """The update of stage 3: gradients leave the backward pass as shards (gathered.py), and no weights are gathered
    after the update."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        gather_layers(self.model, self.trainable, self.optimized, self.groups)

    def sources(self) -> list[tf.Variable]:
        return [shard.value for shard in self.optimized]

    def storage_variables(self) -> dict[int, keras.Variable]:
        return dict(zip(map(id, self.trainable), self.optimized, strict=True))

    def reduce_gradients(self, kept: list[tf.Tensor]) -> list[tf.Tensor]:
        return kept


def _last_collective(graph: tf.Graph) -> int:
    """The number of the graph's last collective operation, which later ones may have to wait for."""
    return max(
        (
            operation_number(operation)
            for operation in graph.get_operations()
            if operation.type.startswith("Collective")
        ),
        default=0,
    )


def sharded_update(
    runtime: MeshRuntime, model: keras.Model, optimizer: keras.Optimizer, stage: int, **options: Any
) -> ShardedUpdate:
    """Returns the update of --zero=`stage`, 1 to 3."""
    return (Zero3Update if stage == 3 else ZeroUpdate)(runtime, model, optimizer, stage, **options)


def _check(optimizer: keras.Optimizer, model: keras.Model, stage: int) -> None:
    for variable in model.trainable_variables:
        if variable.constraint is not None:
            raise ConfigError(
                f"--zero={stage}, but {variable.path} has a constraint, which needs the whole variable: drop it, or use"
                " --zero=0."
            )
        if stage == 3 and variable.regularizer is not None:
            raise ConfigError(
                f"--zero=3, but {variable.path} has a regularizer, which needs the whole variable: use --weight_decay"
                " instead, or --zero=2."
            )
    if stage == 3 and (loose := keras_layers.own_trainable_variables(model)):
        raise ConfigError(
            f"--zero=3 gathers the variables of a layer while it is called, but {loose[0].path} is the model's own,"
            " which is gathered while all of its layers are called: make it a weight of a layer, or use --zero=2."
        )
    refuse_assigned(model, model.trainable_variables, f"--zero={stage}")
