"""What of a micro-batch is differentiated: the weighted losses of its samples, and what layers add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.batch_plan import BatchPlan
from tfdist.training.objectives import Objective, Scores


class Total(NamedTuple):
    """Of a micro-batch."""

    differentiated: tf.Tensor
    added: (
        tf.Tensor | None
    )  # what layers add, where it must be differentiated by itself: weights of samples do not count for it
    sums: tf.Tensor  # step_output.FIRST_SUMS and those of the metrics


def expected_weight(plan: BatchPlan, scores: Scores) -> float:
    """E: the sum of weights of a global batch in which every weight is 1. `scores`: specs."""
    return float(plan.global_batch * np.prod(scores.weights.shape[1:], dtype=np.int64))


def rows_of(w: tf.Tensor) -> tf.Tensor | float:
    """How many rows a micro-batch with these weights has."""
    return tf.cast(tf.shape(w)[0], tf.float32) if w.shape[0] is None else float(w.shape[0])


def added_by_rows(model: keras.Model) -> bool:
    """Whether layers of the model, which has been called, added more than regularizers of weights."""
    return len(model.losses) > sum(variable.regularizer is not None for variable in model.trainable_variables)


class TotalLoss:
    """(outputs, y, w, scale) -> Total, of the model's last call; see step.py.

    `weighted`: not every weight is known to be 1.
    """

    def __init__(
        self,
        model: keras.Model,
        objective: Objective,
        metric_names: tuple[str, ...],
        global_batch: int,
        expected: float,
        weighted: bool,
    ):
        self.model, self.objective, self.metric_names = model, objective, metric_names
        self.global_batch, self.expected, self.weighted = global_batch, expected, weighted

    def __call__(
        self, outputs: Any, y: Any, w: tf.Tensor, scale: tf.Tensor, losses: Sequence[tf.Tensor] | None = None
    ) -> Total:
        """losses: what was added; None: what the model's layers have recorded."""
        by_rows = bool(losses) if losses is not None else added_by_rows(self.model)
        losses = self.model.losses if losses is None else losses
        scores = self.objective(outputs, y, w)
        loss = tf.reduce_sum(scores.losses * scores.weights)
        weight = tf.reduce_sum(scores.weights)
        metrics = [tf.reduce_sum(scores.metrics[name] * scores.weights) for name in self.metric_names]
        share, added = rows_of(w) / self.global_batch, _sum(losses)
        sums = tf.stack([loss, weight, share * added, *metrics])
        if not self.weighted:  # E / W is 1
            return Total((loss / self.expected + share * added) * scale, None, sums)
        if not by_rows:
            return Total((loss + weight * added) / self.expected * scale, None, sums)  # the same on all replicas
        return Total(loss / self.expected * scale, share * added * scale, sums)

    def of_added(self, w: tf.Tensor, scale: tf.Tensor, losses: Sequence[tf.Tensor]) -> Total:
        """The same of a part of the model that adds `losses`, and of which no outputs are known."""
        added = rows_of(w) / self.global_batch * _sum(losses)
        sums = tf.stack([0.0, 0.0, added, *[0.0] * len(self.metric_names)])
        return Total(added * scale, added * scale if self.weighted else None, sums)


def _sum(losses: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.add_n([tf.cast(term, tf.float32) for term in losses]) if losses else tf.constant(0.0)
