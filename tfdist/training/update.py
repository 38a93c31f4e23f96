"""The update: gradients are kept over micro-batches, reduced over replicas, measured by their norm, and applied.

The step (step.py) computes and decides; an `Update` knows where gradients, optimizer state and parameters live. The one
defined here is data parallelism: every replica holds everything. training/parallel/ has Updates that use shards.

A *piece* is the form in which an Update holds the gradient of one variable: the gradient itself (a tensor, or slices),
or this rank's shard of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import keras
import tensorflow as tf

from tfdist.compat.tensorflow_functions import always_traced
from tfdist.runtime.base import Runtime
from tfdist.training.connected import Connected, apply_connected
from tfdist.training.dtypes import Gradient, global_norm
from tfdist.training.optimizer import ema_variables, swapped_in, updates_rows
from tfdist.training.table_rows import rows_once, subtracting_rows, takes_repeated_rows


class Update(Protocol):
    """Turns gradients into new weights; one object for a whole run."""

    connected: Connected  # which of `sources` have a gradient at all

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """The Update's own state that must be saved."""
        ...

    def sources(self) -> list[tf.Variable]:
        """Returns the variables with respect to which the step differentiates."""
        ...

    def pieces_of_weights(self) -> list[keras.Variable]:
        """Returns the variables that are updated in place of whole weights; their values are saved as the weights'."""
        ...

    def keep(self, gradients: list[Gradient]) -> list[Gradient]:
        """Returns a micro-batch's gradients in the form that is added up over micro-batches: tensors, if there are
        several micro-batches. Called on one replica."""
        ...

    def travels_as_rows(self, gradient: Gradient) -> bool:
        """Returns whether `keep` leaves the gradient as slices."""
        ...

    def reduce(self, kept: list, sums: tf.Tensor, signals: tf.Tensor) -> tuple[list, tf.Tensor]:
        """Returns (pieces of the gradients' sum over replicas, [*sums over replicas, *signals over all workers]).
        Called on one replica."""
        ...

    def norm(self, pieces: Sequence) -> tf.Tensor:
        """float32 []: global norm of the gradient, the same on every worker; finite exactly if every element is."""
        ...

    def apply(self, pieces: list) -> None:
        """Updates the weights. Called on one replica."""
        ...

    def weight_norm(self) -> tf.Tensor:
        """float32 []: the global norm of the weights, the same on every worker."""
        ...

    def figures(self) -> dict[str, float]:
        """Values for a log line. Called between steps."""
        ...

    def averaged(self) -> AbstractContextManager:
        """Context manager in which the weights hold their moving averages, if any. Every worker must enter it."""
        ...


class DataParallel:
    """Every replica holds all weights and optimizer state, and makes the same update.

    slices: if few rows of a table were looked up, its gradient stays tf.IndexedSlices on its way to the other replicas
    and, if the optimizer leaves the other rows unchanged, in the update. Not for GPUs: they would add up repeated rows
    in a different order on every replica.
    bfloat16: all other gradients travel as bfloat16.
    """

    def __init__(
        self,
        runtime: Runtime,
        model: keras.Model,
        optimizer: keras.Optimizer,
        slices: bool = False,
        bfloat16: bool = False,
    ):
        slices = slices and runtime.sums_slices
        self.runtime, self.model, self.optimizer, self.slices = runtime, model, optimizer, slices
        self.bfloat16 = bfloat16 and runtime.replicas > 1
        if slices and updates_rows(optimizer):
            optimizer.assign_sub = subtracting_rows(optimizer)
        self.connected = Connected(model.trainable_variables)
        self._sent_bytes = self._whole_bytes = 0  # a replica's gradients of a step; known once `reduce` was traced

    @property
    def variables(self) -> dict[str, tf.Variable]:
        return {}

    def sources(self) -> list[tf.Variable]:
        return [variable.value for variable in self.model.trainable_variables]

    def pieces_of_weights(self) -> list[keras.Variable]:
        return []

    def keep(self, gradients: list[Gradient]) -> list[Gradient]:
        return [
            gradient if self.travels_as_rows(gradient) else tf.convert_to_tensor(gradient) for gradient in gradients
        ]

    def travels_as_rows(self, gradient: Gradient) -> bool:
        """Returns whether `keep` leaves the gradient as slices: if all replicas together have no more rows than the
        table. The rows are then at most half of what an all-reduce sends.
        """
        if (
            not self.slices
            or not isinstance(gradient, tf.IndexedSlices)
            or gradient.dtype != tf.float32
            or not gradient.values.shape.is_fully_defined()
        ):
            return False
        return self.runtime.replicas * (gradient.values.shape[0] or 0) <= (gradient.shape[0] or 0) < 2**31

    def reduce(self, kept: list, sums: tf.Tensor, signals: tf.Tensor) -> tuple[list, tf.Tensor]:
        # The sums go last: they depend on the forward pass alone, but must not delay the first bucket.
        travel = [
            tf.cast(piece, tf.bfloat16) if self.bfloat16 and isinstance(piece, tf.Tensor) else piece for piece in kept
        ]
        self._sent_bytes, self._whole_bytes = self._count(travel), self._count(kept)
        reduced = self.runtime.all_reduce([*travel, tf.concat([sums, signals], 0)])
        return [
            self._summed(piece, source) if isinstance(piece, tf.IndexedSlices) else tf.cast(piece, gradient.dtype)
            for piece, gradient, source in zip(reduced[:-1], kept, self.sources(), strict=True)
        ], reduced[-1]

    def _summed(self, slices: tf.IndexedSlices, table: tf.Variable) -> Gradient:
        """Returns the sum of slices in the form that the optimizer takes."""
        if not updates_rows(self.optimizer):
            return tf.convert_to_tensor(slices)
        return slices if takes_repeated_rows(table) else rows_once(slices)

    def _count(self, pieces: Sequence[Gradient]) -> int:
        """Returns the bytes of gradients; for slices, the bytes of their rows and row numbers."""
        return sum(
            (
                piece.values.shape.num_elements() * piece.dtype.size + piece.values.shape[0] * piece.indices.dtype.size
                if isinstance(piece, tf.IndexedSlices)
                else variable.shape.num_elements() * piece.dtype.size
            )
            for piece, variable in zip(pieces, self.sources(), strict=True)
        )

    def norm(self, pieces: Sequence) -> tf.Tensor:
        return global_norm([rows_once(piece) if isinstance(piece, tf.IndexedSlices) else piece for piece in pieces])

    def apply(self, pieces: list) -> None:
        apply_connected(self.optimizer, self.connected.only(pieces), self.model.trainable_variables)

    def weight_norm(self) -> tf.Tensor:
        return global_norm(self.sources())

    def figures(self) -> dict[str, float]:
        if not self.bfloat16:
            return {}
        return {
            "compression/sent_bytes": float(self._sent_bytes),
            "compression/whole_bytes": float(self._whole_bytes),
        }

    def averaged(self) -> AbstractContextManager:
        averages = ema_variables(self.optimizer)
        return swapped_in(self.model.trainable_variables, averages) if averages else contextlib.nullcontext()


def compiled(differentiate: Callable, update: Update) -> Callable:
    """Compiles `differentiate`, which returns a nest of gradients and other tensors, with XLA. Slices that travel as
    slices get back the static shapes that they lose on the way out of XLA."""
    shapes: list[_SlicesShape | None] = []  # None for everything but such slices

    def inside(*args: tf.Tensor) -> Any:
        found = differentiate(*args)
        leaves = tf.nest.flatten(found)
        shapes[:] = [
            _SlicesShape(leaf.values.shape, leaf.shape) if update.travels_as_rows(leaf) else None for leaf in leaves
        ]
        leaves = [leaf if shape else tf.convert_to_tensor(leaf) for leaf, shape in zip(leaves, shapes, strict=True)]
        return tf.nest.pack_sequence_as(found, leaves)

    function = always_traced(inside, jit_compile=True)

    def outside(*args: tf.Tensor) -> Any:
        found = function(*args)
        leaves = tf.nest.flatten(found)
        leaves = [shape.given_to(leaf) if shape else leaf for leaf, shape in zip(leaves, shapes, strict=True)]
        return tf.nest.pack_sequence_as(found, leaves)

    return outside


def in_xla(function: Callable) -> Callable:
    """Makes the function one operation that XLA compiles. Meant for GPUs, which wait for each of hundreds of small
    kernels: ResNet-50 trains 12 % faster on an H200. A CPU is 4 to 8 % slower with it."""
    return tf.function(function, autograph=False, jit_compile=True)


class _SlicesShape(NamedTuple):
    rows: tf.TensorShape  # the shape of all values
    table: tf.TensorShape

    def given_to(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        return tf.IndexedSlices(
            tf.ensure_shape(slices.values, self.rows),
            tf.ensure_shape(slices.indices, self.rows[:1]),
            tf.constant([size or 0 for size in self.table]),
        )


def unscaling(weight: tf.Tensor, expected_weight: float, scale: tf.Tensor | float = 1.0) -> tf.Tensor:
    """float32 []: the factor between the gradient of scale * sum_i w_i * loss_i / E and the gradient of the mean loss.

    With `weight` = W = sum_i w_i and `expected_weight` = E it is E / W / scale; 0 if no sample has a weight.
    """
    return tf.where(weight > 0, expected_weight / tf.maximum(weight, 1e-30) / scale, 0.0)


def clipping(norm: tf.Tensor, limit: float) -> tf.Tensor:
    """float32 []: the factor that scales a gradient of this norm to a norm of at most `limit`."""
    return limit / tf.maximum(norm, limit)
