"""Objectives: what a model's outputs are compared with, as unreduced losses and metrics.

An objective is a callable `(outputs, y, w) -> Scores`. It does not reduce: the step divides by the *global* sum of
weights over micro-batches and workers, which no worker knows alone. Legend: n samples, T tokens, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.config import ModelConfig
from tfdist.control.exit_codes import ConfigError
from tfdist.plugins import resolve
from tfdist.training.own_objective import own_objective
from tfdist.training.scores import Scores

Objective = Callable[[Any, Any, tf.Tensor], Scores]


def classification(label_smoothing: float = 0.0) -> Objective:
    """Softmax cross-entropy in nats and accuracy; outputs: logits [n, C] or [n, T, C], y: int [n] or [n, T]."""

    def objective(outputs: tf.Tensor, y: tf.Tensor, w: tf.Tensor) -> Scores:
        logits = tf.cast(outputs, tf.float32)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
        if label_smoothing:
            # (1 - e) * CE(y) + e * mean over classes of CE(class): Szegedy et al. 2016, arXiv:1512.00567
            uniform = tf.reduce_logsumexp(logits, -1) - tf.reduce_mean(logits, -1)
            losses = (1 - label_smoothing) * losses + label_smoothing * uniform
        correct = tf.cast(tf.equal(tf.argmax(logits, -1, output_type=tf.int32), tf.cast(y, tf.int32)), tf.float32)
        return Scores(losses, weights_like(w, losses), {"accuracy": correct})

    return objective


def regression() -> Objective:
    """Squared error per sample (mean over the other dims) and absolute error; outputs and y: [n, ...]."""

    def objective(outputs: tf.Tensor, y: tf.Tensor, w: tf.Tensor) -> Scores:
        outputs = tf.cast(outputs, tf.float32)
        errors = tf.reshape(outputs - tf.reshape(tf.cast(y, tf.float32), tf.shape(outputs)), [tf.shape(outputs)[0], -1])
        return Scores(tf.reduce_mean(errors**2, 1), w, {"absolute_error": tf.reduce_mean(tf.abs(errors), 1)})

    return objective


OBJECTIVES: dict[str, Callable[[ModelConfig], Objective]] = {
    "classification": lambda config: classification(config.label_smoothing),
    "next_token": lambda config: classification(config.label_smoothing),
    "regression": lambda config: regression(),
}


def make_objective(config: ModelConfig, y_spec: Any) -> Objective:
    """The objective named by --objective; `auto`: by the target's spec for one sample (int: classification, float: regression).

    Raises: ConfigError if the name is unknown or `auto` cannot tell.
    """
    name = config.objective
    if name == "auto":
        if not isinstance(y_spec, tf.TensorSpec):
            raise ConfigError("--objective=auto cannot choose for a target with several parts: give --objective=package.module:function.")
        name = "classification" if y_spec.dtype.is_integer else "regression"
    if name in OBJECTIVES:
        return OBJECTIVES[name](config)
    return own_objective(name, resolve("objective", name, OBJECTIVES))


def weights_like(w: tf.Tensor, losses: tf.Tensor) -> tf.Tensor:
    """Weights of samples [n] as weights of what the losses count: unchanged, or repeated over tokens [n, T]."""
    if w.shape.rank == losses.shape.rank:
        return w
    return tf.broadcast_to(tf.reshape(w, [-1] + [1] * (losses.shape.rank - 1)), tf.shape(losses))
