"""The part of a micro-batch that is differentiated: weighted losses of its samples, and losses that layers add."""

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
    share: tf.Tensor | float  # the micro-batch's part of the global batch
    added: tf.Tensor  # the sum of the losses that layers add
    sums: tf.Tensor  # step_output.FIRST_SUMS and the sums of the metrics

    def weighted_mean(self, expected: float) -> tf.Tensor:
        """Returns a replica's part if `added` is the same on all: their sum is W / E times (mean loss + added)."""
        return (self.loss + self.weight * self.added) / expected


class Total(NamedTuple):
    """The tensors of a micro-batch that are differentiated, and its sums."""

    differentiated: tf.Tensor
    # Losses that layers add, if differentiated separately, because the weights of samples do not apply to them.
    added: tf.Tensor | None
    sums: tf.Tensor


def expected_weight(plan: BatchPlan, scores: Scores) -> float:
    """Returns E, the sum of weights of a global batch in which every weight is 1. scores: specs."""
    of_a_sample = scores.weights.shape[1:].num_elements()
    if of_a_sample is None:
        raise ConfigError(
            f"The objective returns weights of shape {scores.weights.shape}, but only the first dim may be unknown:"
            " give samples of one shape."
        )
    return float(plan.global_batch * of_a_sample)


def rows_of(w: tf.Tensor) -> tf.Tensor | float:
    """Returns the number of rows of a micro-batch with these weights."""
    rows = w.shape.as_list()[0]
    return tf.cast(tf.shape(w)[0], tf.float32) if rows is None else float(rows)


def _are_by_rows(model: keras.Model, losses: Sequence[tf.Tensor]) -> bool:
    return len(losses) > sum(variable.regularizer is not None for variable in model.trainable_variables)


class SummedLoss:
    """Callable (outputs, y, w, losses) -> Summed. losses: the losses that layers added."""

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
    """Callable (outputs, y, w, scale) -> Total, for the model's last call; see step.py.

    expected: E. weighted: whether some weights may differ from 1.
    """

    def __init__(self, model: keras.Model, summed: SummedLoss, expected: float, weighted: bool):
        self.model, self.summed, self.expected, self.weighted = model, summed, expected, weighted
        self.sums_count = len(FIRST_SUMS) + len(summed.metric_names)

    def __call__(
        self, outputs: Any, y: Any, w: tf.Tensor, scale: tf.Tensor, losses: Sequence[tf.Tensor] | None = None
    ) -> Total:
        """losses: the losses that layers added; None: those that the model's layers have recorded."""
        added = self.model.losses if losses is None else losses  # read once: it calls regularizers, which may count
        by_rows = bool(added) if losses is not None else _are_by_rows(self.model, added)
        found = self.summed(outputs, y, w, added)
        # The gradient is multiplied by E / W later, once W is known (step.py). Without weights the factor is 1.
        if not self.weighted:
            return Total((found.loss / self.expected + found.share * found.added) * scale, None, found.sums)
        # Regularizers are the same on all replicas: each replica's part is in proportion to its weights, as in the
        # loss.
        if not by_rows:
            return Total(found.weighted_mean(self.expected) * scale, None, found.sums)
        # Added losses that depend on rows have no weights: differentiated separately, then multiplied by W / E.
        return Total(found.loss / self.expected * scale, found.share * found.added * scale, found.sums)

    def of_added(self, w: tf.Tensor, scale: tf.Tensor, losses: Sequence[tf.Tensor]) -> Total:
        """Returns the total for a part of the model that adds `losses` and whose outputs are not known."""
        added = rows_of(w) / self.summed.global_batch * _sum(losses)
        sums = tf.stack([0.0, 0.0, added, *[0.0] * len(self.summed.metric_names)])
        return Total(added * scale, added * scale if self.weighted else None, sums)


def _sum(losses: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the sum of all losses. A loss with several values, such as one per row, is summed, as in
    keras.Model.compute_loss."""
    terms = [tf.cast(term, tf.float32) for term in losses]
    return tf.add_n([tf.reduce_sum(term) if term.shape.rank else term for term in terms]) if terms else tf.constant(0.0)
