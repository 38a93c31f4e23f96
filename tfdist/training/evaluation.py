"""Evaluation: every sample once, whatever the number of workers, with no communication until the end.

Each replica adds up its samples in float64; the workers' sums are gathered once at the end and added in rank order. So
the result is the same as in one process, up to the rounding of float64 sums, and no worker waits for another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat.keras_random import global_seed_generator
from tfdist.compat.keras_tensors import taken_apart
from tfdist.control.exit_codes import PeerLostError
from tfdist.data.reading import masked
from tfdist.models import missing_rows
from tfdist.models.compiled_functions import in_steps
from tfdist.runtime.base import Runtime
from tfdist.training.objectives import Objective, scores_spec
from tfdist.training.scores import Scores
from tfdist.training.seeds import draw_from


class Evaluator:
    """Evaluates a model on an evaluation split.

    Args:
      datasets: called for each evaluation; returns ([one dataset of (x, y, w, real) per local replica], steps). Rows
        that are not `real` are padding: they have w == 0 and count for nothing, whatever the objective returns for
        them. `steps` is the same on every replica.
      averaged: returns a context manager in which the model holds the values to evaluate, for example moving averages.
    """

    def __init__(
        self,
        runtime: Runtime,
        model: keras.Model,
        objective: Objective,
        datasets: Callable[[], tuple[Sequence[tf.data.Dataset], int]],
        averaged: Callable[[], contextlib.AbstractContextManager],
    ):
        self.averaged = averaged
        self.runtime, self.model, self.objective, self.datasets = runtime, model, objective, datasets
        self.failed_together = False  # the last evaluation failed on one worker or more, and all workers know it
        self._names: tuple[str, ...] = ()
        self._without_one = global_seed_generator()
        self._cuts = False  # cuts off padding before the objective, if losses cannot be matched to rows
        self._function = tf.function(self._steps, autograph=False)

    def __call__(self) -> dict[str, float]:
        """Returns means over the split: "loss", the objective's metrics, and "samples" (the sum of the weights). Means
        over nothing are 0."""
        self.failed_together = False
        local = self._agreed(self._of_this_worker)
        loss, weight, *metrics = np.sum(self.runtime.all_gather(local), axis=0)
        means = {
            name: float(value / weight) if weight else 0.0  # as training shows
            for name, value in zip(("loss", *self._names), (loss, *metrics), strict=True)
        }
        return {**means, "samples": float(weight)}

    def _of_this_worker(self) -> np.ndarray:
        """float64 [loss, weight, *metrics]: weighted sums over this worker's samples."""
        datasets, steps = self.datasets()
        if not self._names:
            element: Any = datasets[0].element_spec
            *batch, real = element
            spec = scores_spec(self.model, self.objective, batch)
            self._names = tuple(sorted(spec.metrics))
            self._cuts = real.shape[0] is not None and spec.losses.shape[0] != real.shape[0]
        with self.averaged():
            return (
                self._function([iter(dataset) for dataset in datasets], tf.constant(steps)).numpy()
                * self.runtime.counts_samples
            )

    def _agreed(self, work: Callable[[], np.ndarray]) -> np.ndarray:
        """Returns the result of `work`. A collective call: if `work` fails on one worker, all workers raise, so that
        nobody waits for sums that do not come, and all can still save together."""
        alone = self.runtime.size == 1
        failure, result = None, np.zeros(0)
        try:
            result = work()
        except Exception as error:
            # The forward pass of a cut model is a collective: other workers may be waiting in the middle of theirs.
            if not alone and not self.runtime.holds_whole_model:
                raise
            failure = error
        failed = [int(failure is not None)]
        if not alone and self.runtime.holds_whole_model:
            try:
                failed = self.runtime.all_gather(np.array(failed, np.int32)).ravel().tolist()
            except Exception as error:  # maybe for the same reason: a peer is gone
                raise failure or error from None
        self.failed_together = any(failed)
        if failure:
            raise failure
        if self.failed_together:
            raise PeerLostError(f"The evaluation has failed on rank {failed.index(1)}.")
        return result

    def _steps(self, iterators: list, steps: tf.Tensor) -> tf.Tensor:
        """float64 [loss, weight, *metrics]: weighted sums over this worker's replicas."""

        def one(step, totals):
            batch = self.runtime.per_replica([iterator.get_next() for iterator in iterators])
            return step + 1, totals + tf.add_n(self.runtime.local(self.runtime.run(self._sums, batch)))

        return tf.while_loop(
            lambda step, _: step < steps, one, (tf.constant(0), tf.zeros([2 + len(self._names)], tf.float64))
        )[1]

    def _sums(self, x, y, w: tf.Tensor, real: tf.Tensor) -> tf.Tensor:
        draw_from(self._without_one)
        with missing_rows.as_nan(missing_rows.are_silent()), in_steps():
            scores = self._scores(self.model(x, training=False), y, w, real)
            weights = tf.cast(scores.weights, tf.float64)
            values = [scores.losses, *(scores.metrics[name] for name in self._names)]
            # A padding row may well have an infinite loss: select, do not multiply by 0.
            sums = [tf.reduce_sum(tf.where(weights != 0, tf.cast(value, tf.float64) * weights, 0)) for value in values]
            sums = missing_rows.poisoned(sums)
        return tf.stack([sums[0], tf.reduce_sum(weights), *sums[1:]])

    def _scores(self, outputs: Any, y: Any, w: tf.Tensor, real: tf.Tensor) -> Scores:
        """Returns the scores; padding has weight 0, or is cut off before, as a user's objective may ignore w."""
        if not self._cuts:
            scores = self.objective(outputs, y, w)
            # Batches with an unknown number of rows are not padded.
            return scores if real.shape[0] is None else scores._replace(weights=masked(scores.weights, real))
        count = tf.reduce_sum(tf.cast(real, tf.int32))  # real rows come first

        def of_real() -> list[tf.Tensor]:
            tensors, put_together = taken_apart((outputs, y, w))
            scores = self.objective(*put_together(tensor[:count] for tensor in tensors))
            values = (scores.losses, scores.weights, *(scores.metrics[name] for name in self._names))
            return [tf.reshape(value, [-1]) for value in values]

        def of_none() -> list[tf.Tensor]:
            return [tf.zeros([0])] * (2 + len(self._names))

        values: Any = tf.cond(count > 0, of_real, of_none)
        losses, weights, *metrics = values
        return Scores(losses, weights, dict(zip(self._names, metrics, strict=True)))
