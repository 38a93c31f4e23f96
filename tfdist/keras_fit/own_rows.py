"""The other way to spread a step, for outputs too large to pass around (logits of a language model, dense segmentation).

Each worker computes loss and metrics of its own rows only. With n_r of n rows on worker r,
    loss = sum_r n_r / n * loss_r            gradients alike
    state of a metric = before + sum_r (what the rows of r add to a state of zeros)
which is what one process computes if the loss is a mean over rows of equal weight and the state of every metric is a
sum. That is checked here; where it does not hold, all rows are gathered (rows.py), whatever they cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_fit.rows import Part
from tfdist.runtime.sockets import Sockets

LARGEST = 16 * 2**20  # bytes of outputs of one global batch that are passed between workers


def suits(model: keras.Model, batch: Any) -> bool:
    """Whether the outputs are large and own rows will do. The model is built."""
    x = keras.utils.unpack_x_y_sample_weight(batch)[0]
    standard = all(getattr(type(model), name) is getattr(keras.Model, name) for name in ("train_step", "test_step", "compute_loss", "compute_metrics"))
    means = all(getattr(loss, "reduction", "sum_over_batch_size") == "sum_over_batch_size" for loss in keras.tree.flatten(model.loss))
    ours = all(_is_a_sum(metric) for metric in model.metrics)
    if not (standard and means and ours):
        return False

    def outputs(x: Any) -> tuple[list, list]:
        flat = keras.tree.flatten(model(x, training=False))
        return flat, [output for output in flat if getattr(output, "_keras_mask", None) is not None]

    flat, masked = tf.function(outputs, autograph=False).get_concrete_function(x).structured_outputs
    size = sum(output.shape.num_elements() * output.dtype.size if output.shape.is_fully_defined() else 0 for output in flat)
    return len(flat) == 1 and not masked and size > LARGEST


def _is_a_sum(metric: keras.metrics.Metric) -> bool:
    """Of Keras' own metrics the state is a sum over samples that begins at zero."""
    inner = getattr(metric, "metrics", [])
    return type(metric).__module__.startswith("keras.") and all(_is_a_sum(one) for one in inner)


def step(runtime: Sockets, model: keras.Model, part: Part, one_step: Callable[[Any], Any], batch: Any) -> dict[str, tf.Tensor]:
    """The logs of all rows after `one_step`, Keras' train_step or test_step, has seen this worker's rows of the batch."""
    variables = [variable.value for variable in model.metrics_variables]
    before = [tf.identity(variable) for variable in variables]
    for variable in variables:
        variable.assign(tf.zeros_like(variable))
    # Nothing else in a step compares the batches of the workers.
    with tf.control_dependencies(runtime.gather([tf.zeros([1])], part.ends)):
        has_rows = tf.minimum(part.count, 1)
    runtime.rows_count = tf.cast(has_rows, tf.float32)
    try:
        one_step(part.take(batch))
    finally:
        runtime.rows_count = None
    added = runtime.all_reduce([variable * tf.cast(has_rows, variable.dtype) for variable in variables])
    for variable, old, more in zip(variables, before, added, strict=True):
        variable.assign(old + more)
    return model.get_metrics_result()
