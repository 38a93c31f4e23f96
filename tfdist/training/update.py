"""What becomes of gradients: kept over micro-batches, reduced over replicas, judged by their norm, applied.

The step (step.py) computes and decides; an `Update` knows where gradients, optimizer state and parameters live. The one
here is data parallelism: everything is whole on every replica. training/parallel/ has those that share things out.

A *piece* is what an Update makes of the gradient of one variable: the gradient itself, or this rank's shard of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import keras
import tensorflow as tf

from tfdist.runtime.base import Runtime
from tfdist.training.optimizer import ema_variables, swapped_in


class Update(Protocol):
    """From gradients to new weights; one object for a whole run."""

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """State of its own that must be saved."""

    def sources(self) -> list[tf.Variable]:
        """What the step differentiates with respect to."""

    def keep(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """On one replica: of the gradients of a micro-batch, what is added up over micro-batches."""

    def reduce(self, kept: list[tf.Tensor], sums: tf.Tensor, signals: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        """On one replica: (pieces of the gradients' sum over replicas, [*sums over replicas, *signals over all workers])."""

    def norm(self, pieces: Sequence[tf.Tensor]) -> tf.Tensor:
        """float32 []: the global norm of the gradient, the same on every worker; finite exactly if every element is."""

    def apply(self, pieces: list[tf.Tensor]) -> None:
        """On one replica: updates the weights."""

    def weight_norm(self) -> tf.Tensor:
        """float32 []: the global norm of the weights, the same on every worker."""

    def averaged(self) -> AbstractContextManager:
        """Within it, the weights are their moving averages, if there are any. Every worker must enter it."""


class DataParallel:
    """Every replica holds all weights and optimizer state, and makes the same update."""

    def __init__(self, runtime: Runtime, model: keras.Model, optimizer: keras.Optimizer):
        self.runtime, self.model, self.optimizer = runtime, model, optimizer

    @property
    def variables(self) -> dict[str, tf.Variable]:
        return {}

    def sources(self) -> list[tf.Variable]:
        return [variable.value for variable in self.model.trainable_variables]

    def keep(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        return gradients

    def reduce(self, kept: list[tf.Tensor], sums: tf.Tensor, signals: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        # The small tensor goes last: it depends on the forward pass alone but must not hold up the first pack.
        reduced = self.runtime.all_reduce([*kept, tf.concat([sums, signals], 0)])
        return reduced[:-1], reduced[-1]

    def norm(self, pieces: Sequence[tf.Tensor]) -> tf.Tensor:
        return tf.linalg.global_norm(pieces)

    def apply(self, pieces: list[tf.Tensor]) -> None:
        self.optimizer.apply(pieces, self.model.trainable_variables)

    def weight_norm(self) -> tf.Tensor:
        return tf.linalg.global_norm(self.sources())

    def averaged(self) -> AbstractContextManager:
        averages = ema_variables(self.optimizer)
        return swapped_in(self.model.trainable_variables, averages) if averages else contextlib.nullcontext()
