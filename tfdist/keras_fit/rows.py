"""Computes a function of a batch on all workers together: each takes its rows, and all get all rows back.

Legend. n: rows of the global batch; worker r of R computes rows [r n // R, (r + 1) n // R). A worker whose part is
empty computes one row that is then dropped, so that no layer sees an empty batch.

The operations that convert between tensors that every worker holds whole and tensors of own rows are each other's
adjoints; gradients.py has the arithmetic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.keras_layers import keep_message
from tfdist.compat.keras_tensors import carry_alike, taken_apart
from tfdist.compat.tensorflow_graphs import has_gradient
from tfdist.control.exit_codes import ConfigError
from tfdist.keras_fit.batches import batch_stamp
from tfdist.keras_fit.losses_inside import Combination
from tfdist.keras_fit.worker_dependence import mark_same_on_all, mark_worker_dependent
from tfdist.runtime import batch_norm
from tfdist.runtime.base import PeerRuntime
from tfdist.runtime.host import as_list
from tfdist.runtime.own_gradient import dense
from tfdist.training.row_checks.model_probe import LossKey, Values
from tfdist.training.row_checks.reductions import SUM

_ELEMENTS = 1024  # of each input, about this many elements are compared
_COMPARED = 16  # at most this many inputs are compared


class OwnRows:
    """The rows of this worker in a batch of n.

    Args:
      inputs: a structure; its tensors with rows hold rows of the batch: all of them, or those that `of_the_batch`
      marks.
    """

    def __init__(self, runtime: PeerRuntime, inputs: Any, of_the_batch: Sequence[bool] | None = None):
        tensors = with_rows(inputs)
        self._others = [id(tensor) for tensor, cut in zip(tensors, of_the_batch or [], strict=False) if not cut]
        batch = [tensor for tensor in tensors if id(tensor) not in self._others]
        if not batch:
            raise ConfigError(
                "tfdist.fit cannot split a batch without a tensor in it: the model's first argument must contain the"
                " batch."
            )
        first = batch[0]
        n = first.shape[0] if first.shape[0] is not None else tf.shape(first)[0]
        if not isinstance(n, int):
            with tf.control_dependencies(
                [
                    tf.debugging.assert_equal(
                        tf.shape(other)[0], n, "tfdist: the inputs of the model have different numbers of rows."
                    )
                    for other in batch[1:]
                ]
            ):
                n = tf.identity(n)
        self._runtime = runtime
        self.n, self.rank, self.size = n, runtime.rank, runtime.size
        self.start, self.stop = runtime.rank * n // runtime.size, (runtime.rank + 1) * n // runtime.size
        self.count = self.stop - self.start  # rows that this worker contributes, maybe none
        minimum, maximum = (min, max) if isinstance(n, int) else (tf.minimum, tf.maximum)
        self._first = maximum(minimum(self.start, n - 1), 0)  # a batch may have no rows at all
        self._last = minimum(maximum(self.stop, self._first + 1), n)
        computed = self._last - self._first
        # The number of rows that this worker computes, if Python knows it and it is not that of all rows.
        self.known_count = computed if isinstance(computed, int) and computed != n else None
        self.sample = [_sample(tensor) for tensor in batch[:_COMPARED]]

    def take(self, value: Any) -> Any:
        """Takes this worker's rows of every tensor in a structure, at least one; other tensors stay whole."""
        return keras.tree.map_structure(lambda leaf: self._rows(leaf) if _has_rows(leaf) else leaf, value)

    def _rows(self, whole: tf.Tensor) -> tf.Tensor:
        part = self._all_of if id(whole) in self._others else self._own_of
        own = part(whole)
        if own is not whole:
            carry_alike(own, whole, part)
        return own

    def _all_of(self, whole: tf.Tensor) -> tf.Tensor:
        return used_by_all(self._runtime, [whole])[0] if has_gradient(whole) else whole

    def _own_of(self, whole: tf.Tensor) -> tf.Tensor:
        if not has_gradient(whole):
            return mark_worker_dependent(whole[self._first : self._last])
        return mark_worker_dependent(_own_rows(self._runtime, whole, self._first, self._last, self.count))

    def trim(self, tensor: tf.Tensor) -> tf.Tensor:
        """Drops the row that was computed only to have any.

        Raises ConfigError if there is not one row for each row of the batch.
        """
        computed = self._last - self._first
        if isinstance(computed, int) and tensor.shape[0] not in (None, computed):
            raise ConfigError(
                f"tfdist.fit needs outputs with one row for each row of the batch, but for {computed} rows the model"
                f" returns {tensor.shape[0]}: reshape them to one row per sample."
            )
        with tf.control_dependencies(
            []
            if isinstance(computed, int)
            else [
                tf.debugging.assert_equal(
                    tf.shape(tensor)[0],
                    computed,
                    "tfdist: the model's outputs do not have one row for each row of the batch.",
                )
            ]
        ):
            return tensor[: self.count]


def _sample(tensor: tf.Tensor) -> tf.Tensor:
    """Numbers spread over all rows, for a check that all workers hold the same. (A batch has a checksum as it was read;
    but a train_step may change it.)"""
    # An odd stride reaches every column if the width of rows is a power of two.
    stride = tf.bitwise.bitwise_or(tf.size(tensor) // _ELEMENTS, 1)
    return tf.reshape(tensor, [-1])[::stride]


@dataclasses.dataclass(frozen=True)
class Forward:
    """The result of a forward pass over own rows."""

    outputs: Any
    losses: dict[LossKey, tf.Tensor]
    combinations: dict[LossKey, Combination]  # how to combine each loss


def together(
    runtime: PeerRuntime, part: OwnRows, forward: Callable[[], Forward]
) -> tuple[Any, dict[LossKey, tf.Tensor]]:
    """Returns (outputs of all rows, losses of all rows) of `forward`, which returns those of this worker's rows."""
    weight = tf.cast(tf.minimum(part.count, 1), tf.float32)
    with batch_norm.weighted(weight):
        computed = forward()
    for output in keras.tree.flatten(computed.outputs):
        if not isinstance(output, tf.Tensor) or output.shape.rank == 0:
            sentence = f"tfdist.fit needs outputs whose first dimension is the batch, but the model returns {output!r}"
            raise keep_message(ConfigError(f"{sentence}: return tensors with one row per sample."))
    tensors, put_together = taken_apart(computed.outputs)
    parts = {key: _part_of(loss, computed.combinations[key], part) for key, loss in computed.losses.items()}
    by_row = [key for key in parts if computed.combinations[key].values == Values.ROWS and parts[key].shape.rank]
    sums = {key: own for key, own in parts.items() if key not in by_row}
    mine = [part.trim(tensor) for tensor in tensors]
    mine += [parts[key][: tf.shape(parts[key])[0] * tf.minimum(part.count, 1)] for key in by_row]
    if sums:
        in_one_type = tf.float64 if any(own.dtype == tf.float64 for own in sums.values()) else tf.float32
        mine.append(tf.concat([tf.reshape(tf.cast(own, in_one_type), [1, -1]) for own in sums.values()], 1))
    everyone = every_row(runtime, mine, part.sample)
    for row in everyone[: len(tensors)]:
        row.set_shape([part.n if isinstance(part.n, int) else None, *row.shape[1:]])
    of_rows = everyone[len(tensors) : len(tensors) + len(by_row)]
    losses = {**parts, **dict(zip(by_row, of_rows, strict=True))}
    if sums:
        totals = tf.split(tf.reduce_sum(everyone[-1], 0), [tf.size(own) for own in sums.values()])
        for (key, own), total in zip(sums.items(), totals, strict=True):
            # Marked itself: a shape of own rows that is known late would make it one of own rows.
            losses[key] = mark_same_on_all(tf.cast(tf.reshape(total, tf.shape(own)), own.dtype))
    return put_together(everyone), losses


def _part_of(loss: tf.Tensor, how: Combination, part: OwnRows) -> tf.Tensor:
    """What the loss of own rows adds to the loss of all rows. In float32, or in float64 if the loss is: Keras adds it
    to the compiled loss, which has this type."""
    own = tf.cast(loss, tf.float64 if loss.dtype == tf.float64 else tf.float32)
    if how.values == Values.ELSEWHERE or (how.values == Values.ROWS and own.shape.rank is None):
        own = tf.reduce_sum(own)  # workers have unlike numbers of values
    elif how.values == Values.ROWS and own.shape.rank == 0:
        own = own[tf.newaxis]  # a worker's only row, squeezed
    weight = tf.cast(tf.minimum(part.count, 1), own.dtype)
    share = tf.cast(part.count, own.dtype) / tf.cast(part.n, own.dtype)
    return own * (weight if how.reduction == SUM else share)


def total(runtime: PeerRuntime, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The sum over workers of each tensor."""
    if not tensors:
        return []

    @tf.custom_gradient
    def total(*tensors):
        def gradient(*upstream):
            return [grad * tf.cast(runtime.size, grad.dtype) for grad in dense(upstream)]

        return runtime.all_reduce(list(tensors)), gradient

    return [mark_same_on_all(sums) for sums in as_list(total(*tensors))]


def every_row(runtime: PeerRuntime, tensors: Sequence[tf.Tensor], same: Sequence[tf.Tensor] = ()) -> list[tf.Tensor]:
    """The rows of all workers for each tensor, in order of rank, however many each worker has; `same`: see
    PeerRuntime.gather.
    """
    counts = [tf.shape(tensor)[0] for tensor in tensors]

    @tf.custom_gradient
    def gather(*tensors):
        *rows, all_counts = runtime.gather([*tensors, tf.stack(counts)[tf.newaxis]], same, batch_stamp)
        starts = tf.unstack(tf.reduce_sum(all_counts[: runtime.rank], 0), num=len(counts))

        def gradient(*upstream):
            return [
                (
                    _own_rows(runtime, grad, start, start + count, count) * tf.cast(runtime.size, grad.dtype)
                    if has_gradient(grad)
                    else None
                )
                for grad, start, count in zip(dense(upstream), starts, counts, strict=True)
            ]

        return rows, gradient

    return [mark_same_on_all(rows) for rows in as_list(gather(*tensors))]


def _own_rows(
    runtime: PeerRuntime, whole: tf.Tensor, first: int | tf.Tensor, last: int | tf.Tensor, count: int | tf.Tensor
) -> tf.Tensor:
    """Returns whole[first:last]. Its first `count` rows are this worker's; the next worker's begin after these."""

    @tf.custom_gradient
    def own(whole) -> Any:
        def gradient(upstream):
            rows = every_row(runtime, [dense([upstream])[0][:count]])[0] / tf.cast(runtime.size, upstream.dtype)
            rows.set_shape(whole.shape)
            return rows

        return whole[first:last], gradient

    return own(whole)


def used_by_all(runtime: PeerRuntime, wholes: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Tensors that all workers hold and each uses for its own rows."""

    @tf.custom_gradient
    def used(*wholes):
        def gradient(*upstream):
            return [grad / tf.cast(runtime.size, grad.dtype) for grad in total(runtime, dense(upstream))]

        return [tf.identity(whole) for whole in wholes], gradient

    return as_list(used(*wholes))


def with_rows(structure: Any) -> list[tf.Tensor]:
    """The tensors in a structure that are not scalars."""
    return [leaf for leaf in keras.tree.flatten(structure) if _has_rows(leaf)]


def _has_rows(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.shape.rank != 0
