"""The part of a micro-batch that is differentiated: the weighted losses of its samples, and what layers add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.control.exit_codes import ConfigError
from tfdist.data.batch_plan import BatchPlan
from tfdist.training.objectives import Objective
from tfdist.training.scores import Scores
from tfdist.training.step_output import FIRST_SUMS


class Summed(NamedTuple):
    """Sums over the samples of a micro-batch."""

    loss: tf.Tensor  # sum_i w_i * loss_i
    weight: tf.Tensor  # sum_i w_i
    share: tf.Tensor | float  # of the global batch
    added: tf.Tensor  # what layers add
    sums: tf.Tensor  # step_output.FIRST_SUMS and those of the metrics

    def weighted_mean(self, expected: float) -> tf.Tensor:
        """A replica's part where `added` is the same on all: the sum of all is E / W times (mean loss + added)."""
        return (self.loss + self.weight * self.added) / expected


class Total(NamedTuple):
    """What is differentiated of a micro-batch, and its sums."""

    differentiated: tf.Tensor
    # What layers add, where it must be differentiated by itself: weights of samples do not count for it.
    added: tf.Tensor | None
    sums: tf.Tensor


def expected_weight(plan: BatchPlan, scores: Scores) -> float:
    """The sum of weights of a global batch in which every weight is 1: E. `scores`: specs."""
    of_a_sample = scores.weights.shape[1:].num_elements()
    if of_a_sample is None:
        raise ConfigError(
            f"The objective gives weights of shape {scores.weights.shape}, of which only the first dim may be unknown:"
            " give samples of one shape."
        )
    return float(plan.global_batch * of_a_sample)


def rows_of(w: tf.Tensor) -> tf.Tensor | float:
    """The number of rows of a micro-batch with these weights."""
    rows = w.shape.as_list()[0]
    return tf.cast(tf.shape(w)[0], tf.float32) if rows is None else float(rows)


def _are_by_rows(model: keras.Model, losses: Sequence[tf.Tensor]) -> bool:
    return len(losses) > sum(variable.regularizer is not None for variable in model.trainable_variables)


class SummedLoss:
    """(outputs, y, w, losses) -> Summed. `losses`: what layers added."""

    def __init__(self, objective: Objective, metric_names: tuple[str, ...], global_batch: int):
        self.objective, self.metric_names, self.global_batch = objective, metric_names, global_batch

    def __call__(self, outputs: Any, y: Any, w: tf.Tensor, losses: Sequence[tf.Tensor]) -> Summed:
        scores = self.objective(outputs, y, w)
        loss = tf.reduce_sum(scores.losses * scores.weights)
        weight = tf.reduce_sum(scores.weights)
        metrics = [tf.reduce_sum(scores.metrics[name] * scores.weights) for name in self.metric_names]
        share, added = rows_of(w) / self.global_batch, _sum(losses)
        return Summed(loss, weight, share, added, tf.stack([loss, weight, share * added, *metrics]))


class TotalLoss:
    """(outputs, y, w, scale) -> Total, of the model's last call; see step.py.

    `expected`: E. `weighted`: not every weight is known to be 1.
    """

    def __init__(self, model: keras.Model, summed: SummedLoss, expected: float, weighted: bool):
        self.model, self.summed, self.expected, self.weighted = model, summed, expected, weighted
        self.sums_count = len(FIRST_SUMS) + len(summed.metric_names)

    def __call__(
        self, outputs: Any, y: Any, w: tf.Tensor, scale: tf.Tensor, losses: Sequence[tf.Tensor] | None = None
    ) -> Total:
        """losses: what was added; None: what the model's layers have recorded."""
        added = self.model.losses if losses is None else losses  # once: to ask calls regularizers, which may count
        by_rows = bool(added) if losses is not None else _are_by_rows(self.model, added)
        found = self.summed(outputs, y, w, added)
        # The gradient is multiplied by E / W later, once W is known (step.py). Not weighted: that is 1.
        if not self.weighted:
            return Total((found.loss / self.expected + found.share * found.added) * scale, None, found.sums)
        # Regularizers are the same on all replicas: each takes its part of them by its weights, as of the loss.
        if not by_rows:
            return Total(found.weighted_mean(self.expected) * scale, None, found.sums)
        # What hangs on rows has no weights: it is differentiated by itself, and multiplied by W / E before.
        return Total(found.loss / self.expected * scale, found.share * found.added * scale, found.sums)

    def of_added(self, w: tf.Tensor, scale: tf.Tensor, losses: Sequence[tf.Tensor]) -> Total:
        """The total of a part of the model that adds `losses` and whose outputs are not known."""
        added = rows_of(w) / self.summed.global_batch * _sum(losses)
        sums = tf.stack([0.0, 0.0, added, *[0.0] * len(self.summed.metric_names)])
        return Total(added * scale, added * scale if self.weighted else None, sums)


def _sum(losses: Sequence[tf.Tensor]) -> tf.Tensor:
    """The sum of all losses; one of several values, such as one a row, is summed as in keras.Model.compute_loss."""
    terms = [tf.cast(term, tf.float32) for term in losses]
    return tf.add_n([tf.reduce_sum(term) if term.shape.rank else term for term in terms]) if terms else tf.constant(0.0)
