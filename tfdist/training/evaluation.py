"""Evaluation: every sample once, whatever the number of workers, with no communication until the end.

Each replica adds up its own samples in float64; the workers' sums meet in one gather at the end and are added in rank
order. So the result is that of one process, up to the rounding of float64 sums, and no worker waits for another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdist.models import missing_rows
from tfdist.runtime.base import Runtime
from tfdist.training.objectives import Objective, scores_spec


class Evaluator:
    """Evaluates a model on an evaluation split.

    Args:
      datasets: makes, anew for each evaluation, ([one dataset of (x, y, w) per local replica], steps); the padding
        rows have w = 0, and `steps` is the same on every replica.
      averaged: makes a context in which the model computes with what is to be evaluated, for example moving averages.
    """

    def __init__(
        self,
        runtime: Runtime,
        model: keras.Model,
        objective: Objective,
        datasets: Callable[[], tuple[Sequence[tf.data.Dataset], int]],
        averaged: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ):
        self.averaged = averaged
        self.runtime, self.model, self.objective, self.datasets = runtime, model, objective, datasets
        self._names: tuple[str, ...] = ()
        self._function = tf.function(self._steps, autograph=False)

    def __call__(self) -> dict[str, float]:
        """Means over the split: "loss", the objective's metrics, and "samples" (the sum of the weights)."""
        datasets, steps = self.datasets()
        if not self._names:
            self._names = tuple(sorted(scores_spec(self.model, self.objective, datasets[0].element_spec).metrics))
        with self.averaged():
            local = (
                self._function([iter(dataset) for dataset in datasets], tf.constant(steps)).numpy() * self.runtime.leads
            )
        loss, weight, *metrics = np.sum(self.runtime.all_gather(local), axis=0)
        means = {
            name: float(value / weight) if weight else float("nan")
            for name, value in zip(("loss", *self._names), (loss, *metrics), strict=True)
        }
        return {**means, "samples": float(weight)}

    def _steps(self, iterators: list, steps: tf.Tensor) -> tf.Tensor:
        """float64 [loss, weight, *metrics]: weighted sums over this worker's replicas."""

        def one(step, totals):
            batch = self.runtime.per_replica([iterator.get_next() for iterator in iterators])
            return step + 1, totals + tf.add_n(self.runtime.local(self.runtime.run(self._sums, batch)))

        return tf.while_loop(
            lambda step, _: step < steps, one, (tf.constant(0), tf.zeros([2 + len(self._names)], tf.float64))
        )[1]

    def _sums(self, x, y, w: tf.Tensor) -> tf.Tensor:
        with missing_rows.as_nan(missing_rows.are_silent()):
            scores = self.objective(self.model(x, training=False), y, w)
            weights = tf.cast(scores.weights, tf.float64)
            values = [scores.losses, *(scores.metrics[name] for name in self._names)]
            # A padding row may well have an infinite loss: select, do not multiply by 0.
            sums = [tf.reduce_sum(tf.where(weights > 0, tf.cast(value, tf.float64) * weights, 0)) for value in values]
            sums = missing_rows.told(sums)
        return tf.stack([sums[0], tf.reduce_sum(weights), *sums[1:]])
