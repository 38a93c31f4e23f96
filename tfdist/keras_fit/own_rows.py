"""The other way to spread a step, for outputs too large to send to all workers (logits of a language model, dense
segmentation).

Each worker computes loss and metrics of its own rows only. With n_r of n rows on worker r,
    loss = sum_r n_r / n * loss_r            gradients alike
    state of a metric = before + sum_r (what the rows of r add to a state of zeros)
which is what one process computes if the loss is a mean over rows of equal weight and the state of every metric is a
sum. This is known to hold for the losses and metrics listed here; for all others all rows are gathered (rows.py),
whatever the cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import losses, metrics

from tfdist.artifacts.hidden_state import metrics_in_layers
from tfdist.compat import keras_layers, keras_trainer
from tfdist.compat.keras_tensors import functional_of, mask_of
from tfdist.keras_fit.batches import batch_stamp
from tfdist.keras_fit.rows import OwnRows
from tfdist.runtime import batch_norm
from tfdist.runtime.base import PeerRuntime

LARGEST = 16 * 2**20  # bytes of the outputs of one global batch that workers still send to each other

# Functions of Keras that give a value for each row, from that row alone. Not: dice, tversky and circle, which use all
# rows together; hinge and squared_hinge, which first check whether all labels of the batch are 0 or 1; ctc.
_OF_EACH_ROW = [
    losses.mean_squared_error,
    losses.mean_absolute_error,
    losses.mean_absolute_percentage_error,
    losses.log_cosh,
    losses.mean_squared_logarithmic_error,
    losses.cosine_similarity,
    losses.huber,
    losses.kl_divergence,
    losses.poisson,
    losses.categorical_hinge,
    losses.binary_crossentropy,
    losses.binary_focal_crossentropy,
    losses.categorical_crossentropy,
    losses.categorical_focal_crossentropy,
    losses.sparse_categorical_crossentropy,
    losses.categorical_generalized_cross_entropy,
    metrics.binary_accuracy,
    metrics.categorical_accuracy,
    metrics.sparse_categorical_accuracy,
    metrics.top_k_categorical_accuracy,
    metrics.sparse_top_k_categorical_accuracy,
]
# Metrics whose state is a sum over rows. The sum of a kind of Mean is right only if there is one value for each row:
# `is_a_sum` also accepts those that are made of a function above.
_SUMS = [
    metrics.RootMeanSquaredError,
    metrics.R2Score,
    metrics.TruePositives,
    metrics.TrueNegatives,
    metrics.FalsePositives,
    metrics.FalseNegatives,
    metrics.Precision,
    metrics.Recall,
    metrics.AUC,
    metrics.SensitivityAtSpecificity,
    metrics.SpecificityAtSensitivity,
    metrics.PrecisionAtRecall,
    metrics.RecallAtPrecision,
    metrics.FBetaScore,
    metrics.F1Score,
    metrics.IoU,
    metrics.BinaryIoU,
    metrics.MeanIoU,
    metrics.OneHotIoU,
    metrics.OneHotMeanIoU,
]


def suits(model: keras.Model, batch: Any) -> bool:
    """Whether the outputs are large and own rows suffice. The model is built."""
    x = keras.utils.unpack_x_y_sample_weight(batch)[0]
    if _are_known_to_be_small(model, x):
        return False
    standard = all(
        getattr(type(model), name) is getattr(keras.Model, name)
        for name in ("train_step", "test_step", "compute_loss", "compute_metrics")
    )
    if not standard:
        return False
    try:
        keras_trainer.build_for(model, batch)  # the compiled losses and metrics, too
    except Exception:  # in the user's code: Keras raises it again when it trains on the batch
        return False
    if not (_has_equal_rows(batch) and _loss_is_a_mean(model) and _metrics_are_sums(model)):
        return False

    def outputs(x: Any) -> tuple[list, list]:
        flat = keras.tree.flatten(model(x, training=False))
        return flat, [output for output in flat if mask_of(output) is not None]

    flat, masked = tf.function(outputs, autograph=False).get_concrete_function(x).structured_outputs
    size = sum(
        output.shape.num_elements() * output.dtype.size if output.shape.is_fully_defined() else 0 for output in flat
    )
    return len(flat) == 1 and not masked and size > LARGEST


def _are_known_to_be_small(model: keras.Model, x: Any) -> bool:
    """Whether the model's graph of layers shows that the outputs are small. This saves a trace, half a second at the
    start."""
    outputs = None if keras_layers.class_has_own_call(type(model)) else getattr(functional_of(model), "outputs", None)
    shapes = [tf.TensorShape(leaf.shape) for leaf in keras.tree.flatten(x) if leaf is not None]
    dims = [shape[0] for shape in shapes if shape.rank]
    rows = [dim for dim in dims if dim is not None]
    is_known = rows and len(rows) == len(dims)
    if not outputs or not is_known or any(None in output.shape[1:] for output in outputs):
        return False
    sizes = [max(rows) * math.prod(output.shape[1:]) * tf.as_dtype(output.dtype).size for output in outputs]
    return sum(sizes) <= LARGEST


def _has_equal_rows(batch: Any) -> bool:
    """Whether every tensor has as many rows as the others: none is a table besides the batch."""
    return len({tuple(leaf.shape[:1]) for leaf in keras.tree.flatten(batch) if leaf is not None}) == 1


def _loss_is_a_mean(model: keras.Model) -> bool:
    """Whether the compiled loss is a mean over rows of equal weight (a sample weight is only a factor, not a part of
    the divisor).
    """
    return all(
        loss is None
        or (_is_of_keras(loss, losses) and loss.reduction in ("sum_over_batch_size", "mean") and _is_of_each_row(loss))
        for loss in keras_trainer.compiled_losses(model)
    )


def _metrics_are_sums(model: keras.Model) -> bool:
    # Keras updates the mean of the losses itself, with the rows as the weight. Other metrics of a model are updated
    # somewhere inside it, with unknown values.
    compiled = keras_trainer.compiled_metrics(model)
    known = set(map(id, (*keras_trainer.metrics_of_compile(model), *compiled)))
    has_others = any(id(each) not in known for each in (*model.metrics, *metrics_in_layers(model)))
    return not has_others and all(map(is_a_sum, compiled))


def is_a_sum(metric: keras.metrics.Metric) -> bool:
    """Whether the metric's state is a sum over rows that starts at zero."""
    # The axis of an F score is that of its sums: the rows, or all.
    if getattr(metric, "axis", -1) != -1 and not isinstance(metric, metrics.FBetaScore):
        return False
    of_a_function = isinstance(metric, metrics.MeanMetricWrapper) and _is_of_keras(metric, metrics)
    return type(metric) in _SUMS or type(metric) is metrics.Accuracy or (of_a_function and _is_of_each_row(metric))


def _is_of_keras(value: Any, module: Any) -> bool:
    """Whether the object is of exactly Keras' own class; a class derived from it may compute anything."""
    return type(value) is getattr(module, type(value).__name__, None) or keras_trainer.is_made_of_a_function(value)


def _is_of_each_row(wrapper: Any) -> bool:
    function, options = keras_trainer.function_and_options(wrapper)
    return function in _OF_EACH_ROW and options.get("axis", -1) == -1 and options.get("ignore_class") is None


def step(
    runtime: PeerRuntime, model: keras.Model, part: OwnRows, one_step: Callable[[Any], Any], batch: Any
) -> dict[str, tf.Tensor]:
    """Returns the logs of all rows after `one_step`, Keras' train_step or test_step, has seen this worker's rows of the
    batch.
    """
    variables = [variable.value for variable in model.metrics_variables]
    before = [tf.identity(variable) for variable in variables]
    for variable in variables:
        variable.assign(tf.zeros_like(variable))
    # Nothing else in a step compares the batches of the workers.
    with tf.control_dependencies(runtime.gather([tf.zeros([1])], part.sample, batch_stamp)):
        has_rows = tf.minimum(part.count, 1)
    with batch_norm.weighted(tf.cast(has_rows, tf.float32)):
        one_step(part.take(batch))
    added = runtime.all_reduce([variable * tf.cast(has_rows, variable.dtype) for variable in variables])
    for variable, old, more in zip(variables, before, added, strict=True):
        variable.assign(old + more)
    return model.get_metrics_result()
