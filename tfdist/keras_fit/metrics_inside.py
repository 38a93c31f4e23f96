"""Keras metrics that a model updates inside its forward pass, where it sees only this worker's rows.

Each update is taken back from the metric, and leaves the forward pass as one of its outputs; then every worker adds the
sum of the updates of all workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.compat import keras_layers, keras_metrics, keras_variables
from tfdist.compat.temporary_attributes import attribute_replaced
from tfdist.control.exit_codes import ConfigError
from tfdist.keras_fit import own_rows
from tfdist.runtime import batch_norm
from tfdist.runtime.base import PeerRuntime

_TRIED_ROWS = 4, 8


class Additions:
    """The updates that metrics get in a forward pass.

    Attributes: values, one tensor for each variable of a metric and each update; they may be replaced by the
    corresponding outputs of a compiled function.
    """

    def __init__(self, metrics: Sequence[keras.metrics.Metric]):
        self._metrics = metrics
        self._variables: list[tf.Variable] = []
        self.values: list[tf.Tensor] = []

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        """Context manager in which updates of the metrics are collected here."""
        with contextlib.ExitStack() as stack:
            for metric in self._metrics:
                stack.enter_context(attribute_replaced(metric, "update_state", self._collecting(metric)))
            yield

    def _collecting(self, metric: keras.metrics.Metric) -> Callable:
        update = metric.update_state

        def update_state(*args: Any, **kwargs: Any) -> None:
            _refuse(metric, args, kwargs)
            before = [tf.identity(variable) for variable in _stored(metric)]
            for variable in _stored(metric):
                variable.assign(tf.zeros_like(variable))
            update(*args, **kwargs)
            variables = _stored(metric)  # some metrics make theirs, of zeros, at their first update
            before += [tf.zeros_like(variable) for variable in variables[len(before) :]]
            for variable, value in zip(variables, before, strict=True):
                self._variables.append(variable)
                self.values.append(tf.identity(variable))
                variable.assign(value)

        return update_state

    def add(self, runtime: PeerRuntime) -> None:
        """Adds the sum of the updates of all workers to every metric."""
        if self.values:
            weight = batch_norm.row_weight()  # 0 if this worker computes its row only to have one, else 1
            assert weight is not None, "a forward pass over own rows has a weight"
            for variable, total in zip(
                self._variables,
                runtime.all_reduce([value * tf.cast(weight, value.dtype) for value in self.values]),
                strict=True,
            ):
                variable.assign_add(total)


def _stored(metric: keras.metrics.Metric) -> list[tf.Variable]:
    # In a layer that computes in half precision `variable.value` would be a copy.
    stored = map(keras_variables.stored_value, metric.variables)
    return [variable for variable in stored if variable is not None]


class _Given(NamedTuple):
    """What an update gives to a metric."""

    metric: keras.metrics.Metric
    values: tf.TensorShape
    counted: tf.TensorShape  # what a mean makes of the values, and counts; otherwise the values


def refuse_without_rows(metrics: Sequence[keras.metrics.Metric], trace: Callable[[int], None]) -> None:
    """Raises ConfigError if a forward pass updates one of these metrics with values of which there are not more if
    there are more rows: each worker would give it what it makes of its own rows, such as their mean. The same if the
    metric is a mean that counts as many values whatever the rows: it takes the mean over the rows itself.

    trace: traces the forward pass with so many rows."""
    given: list[list[_Given]] = []
    for rows in _TRIED_ROWS if metrics else ():
        given.append([])
        with contextlib.ExitStack() as stack, contextlib.suppress(Exception):  # as of a model for batches of one size
            for metric in metrics:
                stack.enter_context(attribute_replaced(metric, "update_state", _noting(metric, given[-1])))
            trace(rows)
    if len({len(updates) for updates in given}) != 1:
        return
    for few, many in zip(*given, strict=True):
        if not few.values.rank:  # a single number: see _refuse
            continue
        if few.values.is_fully_defined() and few.values == many.values:
            what = (
                " with values whose number does not follow the rows, so that they may be a mean or a sum over the rows"
                " that a worker has: give it one value for each row"
            )
        elif few.counted.is_fully_defined() and few.counted == many.counted:
            what = (
                f", where each worker has some of the rows, and {type(few.metric).__name__} takes the mean over these"
                " rows before it counts: give it values whose first dim is the rows, with another dim behind it"
                " (x[:, None]), and either no weights or one for each row"
            )
        else:
            continue
        message = f"The metric {few.metric.name} is updated inside the model's call{what}, or update it in"
        raise keras_layers.keep_message(ConfigError(f"{message} train_step or compute_loss."))


def _noting(metric: keras.metrics.Metric, given: list[_Given]) -> Callable:
    update = metric.update_state

    def update_state(*args: Any, **kwargs: Any) -> None:
        first = next(leaf for leaf in keras.tree.flatten((args, kwargs)) if leaf is not None)
        values = tf.TensorShape(getattr(first, "shape", ()))
        counted = [values]
        with keras_metrics.counted_by_means(lambda counts: counted.append(tf.TensorShape(counts.shape))):
            update(*args, **kwargs)
        given.append(_Given(metric, values, counted[-1]))

    return update_state


def _refuse(metric: keras.metrics.Metric, args: tuple, kwargs: dict) -> None:
    tensors = [leaf for leaf in keras.tree.flatten((args, kwargs)) if leaf is not None]
    if not (type(metric) in (keras.metrics.Mean, keras.metrics.Sum) or own_rows.is_a_sum(metric)):
        raise ConfigError(
            f"The metric {metric.name} is updated inside the model's call, where each worker has some of the rows, and"
            f" {type(metric).__name__} is not known to be a sum over rows: update it in train_step or compute_loss, or"
            " use a metric of keras.metrics."
        )
    if any(len(getattr(leaf, "shape", ())) == 0 for leaf in tensors[:1]):
        raise ConfigError(
            f"The metric {metric.name} is updated inside the model's call with a single number, which may be a mean or"
            " a sum over the rows that a worker has: give it one value for each row, or update it in train_step or"
            " compute_loss."
        )
