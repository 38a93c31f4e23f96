"""Totals over the steps of a call, added up inside its tf.function."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.training.dtypes import Gradient
from tfdist.training.step_output import Layout


class Totals(NamedTuple):
    """Totals over the steps of one call."""

    sums: tf.Tensor  # float64: `Layout.sums` of the steps that took place, then `Layout.signals`
    gradient_norm: tf.Tensor  # float32: of the last step
    compute_s: tf.Tensor  # float64
    skipped: tf.Tensor  # int32
    bad: tf.Tensor  # bool

    @classmethod
    def of_no_step(cls, layout: Layout) -> Totals:
        size = len(layout.sums.names) + len(layout.signals.names)
        zero = tf.constant(0.0, tf.float64)
        return cls(tf.zeros([size], tf.float64), tf.constant(0.0), zero, tf.constant(0), tf.constant(False))

    def plus(self, step: Totals) -> Totals:
        return Totals(
            self.sums + step.sums,
            step.gradient_norm,
            self.compute_s + step.compute_s,
            self.skipped + step.skipped,
            tf.logical_or(self.bad, step.bad),
        )

    def vector(self, layout: Layout, loss_scale: tf.Tensor, bad: tf.Tensor) -> tf.Tensor:
        """float64: `Layout.vector`, in one tensor, so that one copy brings it. `bad`: whatever the steps say."""
        head = {
            "gradient_norm": self.gradient_norm,
            "loss_scale": loss_scale,
            "skipped": self.skipped,
            "bad": tf.logical_or(self.bad, bad),
            "compute_s": self.compute_s,
        }
        return tf.concat([tf.stack([tf.cast(head[name], tf.float64) for name in layout.head.names]), self.sums], 0)


def shown_sums(layout: Layout, sums: tf.Tensor) -> tf.Tensor:
    """`Layout.sums` of a step, all times weights: regularization, which has none, counts with the step's."""
    weight = layout.sums.of(sums, "weight")
    return sums * tf.stack([weight if name == "regularization" else 1.0 for name in layout.sums.names])


class Reduced(NamedTuple):
    """The sums of a step over all replicas."""

    per_replica: Any  # (pieces of the gradients, sums and signals), for `Runtime.run`
    gradients: list[Gradient]  # the pieces of the first local replica
    sums: tf.Tensor  # over samples: `Layout.sums`
    signals: tf.Tensor  # over workers: `Layout.signals`


class Results(NamedTuple):
    """The results of the tf.function that makes steps."""

    step: tf.Tensor  # the counter
    vector: tf.Tensor  # float64: `Layout.vector`
