"""Objectives: they compare a model's outputs with targets, and give unreduced losses and metrics.

An objective is a callable `(outputs, y, w) -> Scores`. It does not reduce: the step divides by the *global* sum of
weights over micro-batches and workers, which no worker knows alone. Legend: n samples, T tokens, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.keras_tensors import as_called
from tfdist.config import ModelConfig
from tfdist.control.exit_codes import ConfigError
from tfdist.plugins import resolve
from tfdist.training.objective_names import OBJECTIVES
from tfdist.training.own_objective import own_objective
from tfdist.training.scores import Scores

Objective = Callable[[Any, Any, tf.Tensor], Scores]
Shape = Sequence[int | None] | tf.TensorShape


def classification(label_smoothing: float = 0.0) -> Objective:
    """Softmax cross-entropy in nats and accuracy; outputs: logits [n, C] or [n, T, C], y: int [n] or [n, T]."""

    def objective(outputs: tf.Tensor, y: tf.Tensor, w: tf.Tensor) -> Scores:
        logits = tf.cast(outputs, tf.float32)
        if y.dtype not in (tf.int32, tf.int64):
            y = tf.cast(y, tf.int64)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
        if label_smoothing:
            # (1 - e) * CE(y) + e * mean over classes of CE(class): Szegedy et al. 2016, arXiv:1512.00567
            uniform = tf.reduce_logsumexp(logits, -1) - tf.reduce_mean(logits, -1)
            losses = (1 - label_smoothing) * losses + label_smoothing * uniform
        # As int64: TensorFlow has no int32 comparison on GPUs.
        correct = tf.cast(tf.equal(tf.argmax(logits, -1), tf.cast(y, tf.int64)), tf.float32)
        return Scores(losses, weights_like(w, losses), {"accuracy": correct})

    return objective


def regression() -> Objective:
    """Squared error and absolute error; outputs and y: both [n, ...], equal except for dims of 1. With w [n] the error
    of each sample is the mean over its other dims; with w [n, T], as the outputs begin, the same for each token."""

    def objective(outputs: tf.Tensor, y: tf.Tensor, w: tf.Tensor) -> Scores:
        outputs = tf.cast(outputs, tf.float32)
        of_y, of_outputs = (
            [shape[0], *(size for size in shape[1:] if size != 1)] for shape in (y.shape, outputs.shape)
        )
        if not _fit(of_y, of_outputs):
            raise ConfigError(
                f"--objective=regression got outputs of shape {outputs.shape} and targets of shape {y.shape}: they must"
                " be the same, but for dims of 1."
            )
        if not _fit(w.shape, outputs.shape[: w.shape.rank]):
            raise ConfigError(
                f"--objective=regression got outputs of shape {outputs.shape} and weights of shape {w.shape}: give one"
                " weight per sample, or weights with the leading dims of the outputs."
            )
        errors = tf.reshape(
            outputs - tf.reshape(tf.cast(y, tf.float32), tf.shape(outputs)),
            tf.concat([tf.shape(outputs)[: w.shape.rank], [-1]], 0),
        )
        errors.set_shape([*outputs.shape[: w.shape.rank], None])
        return Scores(tf.reduce_mean(errors**2, -1), w, {"absolute_error": tf.reduce_mean(tf.abs(errors), -1)})

    return objective


def of_classes(config: ModelConfig) -> Objective:
    """Makes the objective of --objective=classification and --objective=next_token."""
    return classification(config.label_smoothing)


def of_values(config: ModelConfig) -> Objective:
    """Makes the objective of --objective=regression."""
    return regression()


def make_objective(config: ModelConfig, y_spec: Any) -> Objective:
    """Makes the objective named by --objective; `auto` chooses by the target's spec for one sample (int:
    classification, float: regression).

    Raises: ConfigError if the name is unknown or `auto` cannot choose.
    """
    name = config.objective
    if name == "auto":
        if not isinstance(y_spec, tf.TensorSpec):
            raise ConfigError(
                "--objective=auto cannot choose for a target with several parts: give"
                " --objective=package.module:function."
            )
        name = "classification" if y_spec.dtype.is_integer else "regression"
    if name in OBJECTIVES and not _is_numeric(y_spec):
        kind = y_spec.dtype.name if isinstance(y_spec, tf.TensorSpec) else "several tensors"
        raise ConfigError(
            f"--objective={config.objective} takes one tensor of numbers, but a sample's y of --source is {kind}: give"
            " whole numbers for classes, floats for values, or --objective=package.module:function."
        )
    if name in OBJECTIVES:
        return resolve("objective", name, OBJECTIVES)(config)
    return own_objective(name, resolve("objective", name, OBJECTIVES))


def _is_numeric(spec: Any) -> bool:
    return isinstance(spec, tf.TensorSpec) and (spec.dtype.is_integer or spec.dtype.is_floating or spec.dtype.is_bool)


def weights_like(w: tf.Tensor, losses: tf.Tensor) -> tf.Tensor:
    """Returns sample weights [n] in the shape of the losses: unchanged, or repeated over tokens [n, T]."""
    if not _fit(w.shape, losses.shape[: w.shape.rank]):
        raise ConfigError(
            f"The losses have shape {losses.shape}, but the weights {w.shape}: give one weight per sample, or weights"
            " with the leading dims of the losses."
        )
    if w.shape.rank == losses.shape.rank:
        return w
    return tf.broadcast_to(
        tf.reshape(w, tf.concat([tf.shape(w), [1] * (losses.shape.rank - w.shape.rank)], 0)), tf.shape(losses)
    )


def _fit(shape: Shape, other: Shape) -> bool:
    """Returns whether two shapes could be the same: equally many dims, and no two that are known to differ."""
    return len(shape) == len(other) and all(a == b or None in (a, b) for a, b in zip(shape, other, strict=True))


def _output_spec(model: keras.Model, x: Any) -> Any:
    """Returns the specs of the outputs of a model that does not know them."""
    try:
        return model.compute_output_spec(
            tf.nest.map_structure(lambda spec: keras.KerasTensor(spec.shape, spec.dtype), x)
        )
    except ValueError:  # of an inner model whose layers are cut over a mesh: they report their uncut specs
        return tf.function(model, autograph=False).get_concrete_function(x).structured_outputs


def scores_spec(model: keras.Model, objective: Objective, batch_spec: Any) -> Scores:
    """Returns the specs of the result of `objective` for a batch; runs nothing."""
    x, y, w = batch_spec
    try:
        output = as_called(model.output)  # functional models and built Sequential models know it
    except (AttributeError, ValueError):
        output = _output_spec(model, x)
    output = tf.nest.map_structure(lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype), output)
    scores = tf.function(objective, autograph=False).get_concrete_function(output, y, w).structured_outputs
    if not _fit(scores.weights.shape, scores.losses.shape):
        raise ConfigError(
            f"The objective returned losses of shape {scores.losses.shape} and weights of shape {scores.weights.shape}:"
            " they must be the same."
        )
    return scores
