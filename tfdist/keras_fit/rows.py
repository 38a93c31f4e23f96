"""A function of a batch, computed by all workers together: each takes its rows, all get all rows back.

Legend. n: rows of the global batch; worker r of R computes rows [r n // R, (r + 1) n // R). A worker whose part is empty
computes one row that is then dropped, so that no layer sees an empty batch.

The operations between what every worker holds whole and what it holds of its own are each other's adjoints; gradients.py
has the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.control.exit_codes import ConfigError
from tfdist.keras_fit.lookups import mark
from tfdist.runtime.sockets import Sockets

_ELEMENTS = 1024  # of a row that are compared


class Part:
    """The rows of this worker in a batch of n."""

    def __init__(self, runtime: Sockets, inputs: Any):
        first = next((tensor for tensor in keras.tree.flatten(inputs) if _has_rows(tensor)), None)
        if first is None:
            raise ConfigError("tfdist.fit cannot split a batch without a tensor in it: the model's first argument must hold the batch.")
        n = first.shape[0] if first.shape[0] is not None else tf.shape(first)[0]
        self._runtime = runtime
        self.n, self.rank, self.size = n, runtime.rank, runtime.size
        self.start, self.stop = runtime.rank * n // runtime.size, (runtime.rank + 1) * n // runtime.size
        self.count = self.stop - self.start  # what this worker contributes, maybe nothing
        minimum, maximum = (min, max) if isinstance(n, int) else (tf.minimum, tf.maximum)
        self._first = minimum(self.start, n - 1)
        self._last = maximum(self.stop, self._first + 1)
        # What tells whether all workers hold the same batch: the beginnings of its first and last row.
        self.ends = [tf.reshape(row, [-1])[:_ELEMENTS] for row in (first[0], first[-1])]

    def take(self, value: Any) -> Any:
        """This worker's rows of every tensor in a structure; at least one."""
        return keras.tree.map_structure(lambda leaf: mark(self._rows(leaf)) if _has_rows(leaf) else leaf, value)

    def _rows(self, whole: tf.Tensor) -> tf.Tensor:
        if not _is_differentiable(whole):
            return whole[self._first:self._last]
        return _own_rows(self._runtime, whole, self._first, self._last, self.count)

    def trim(self, tensor: tf.Tensor) -> tf.Tensor:
        """Drops the row that was only computed to have any."""
        return tensor[:self.count]


def together(runtime: Sockets, part: Part, forward: Callable[[], tuple[Any, list]]) -> tuple[Any, list]:
    """(outputs of all rows, losses) of `forward`, which returns those of this worker's part.

    Losses are scalars that layers recorded as means over their rows; here they become means over all rows.
    """
    runtime.rows_count = tf.cast(tf.minimum(part.count, 1), tf.float32)
    try:
        outputs, losses = forward()
    finally:
        runtime.rows_count = None
    flat = keras.tree.flatten(outputs)
    for output in flat:
        if not isinstance(output, tf.Tensor) or output.shape.rank == 0:
            raise ConfigError(f"tfdist.fit needs outputs whose first dimension is the batch, but the model returns {output!r}: return tensors with one row per sample.")
    masks = [getattr(output, "_keras_mask", None) for output in flat]
    mine = [part.trim(tensor) for tensor in (*flat, *(mask for mask in masks if mask is not None))]
    share = tf.cast(part.count, tf.float32) / tf.cast(part.n, tf.float32)
    if losses:
        mine.append(tf.stack([tf.cast(tf.reduce_sum(loss), tf.float32) * share for loss in losses])[tf.newaxis])
    everyone = every_row(runtime, mine, part.ends)
    for row in everyone[:len(mine) - bool(losses)]:
        row.set_shape([part.n if isinstance(part.n, int) else None, *row.shape[1:]])
    rows = iter(everyone)
    gathered = [next(rows) for _ in flat]
    for output, mask in zip(gathered, masks, strict=True):
        if mask is not None:
            output._keras_mask = next(rows)
    total = list(tf.unstack(tf.reduce_sum(next(rows), 0), num=len(losses))) if losses else []
    return keras.tree.pack_sequence_as(outputs, gathered), total


def total(runtime: Sockets, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The sum over workers of each tensor."""
    if not tensors:
        return []

    @tf.custom_gradient
    def total(*tensors):
        def gradient(*upstream):
            return [grad * tf.cast(runtime.size, grad.dtype) for grad in upstream]

        return runtime.all_reduce(list(tensors)), gradient

    return _list(total(*tensors))


def every_row(runtime: Sockets, tensors: Sequence[tf.Tensor], same: Sequence[tf.Tensor] = ()) -> list[tf.Tensor]:
    """The rows of all workers of each tensor, in order of rank, however many each worker has; `same`: see Sockets.gather."""
    counts = [tf.shape(tensor)[0] for tensor in tensors]

    @tf.custom_gradient
    def gather(*tensors):
        *rows, all_counts = runtime.gather([*tensors, tf.stack(counts)[tf.newaxis]], same)
        starts = tf.unstack(tf.reduce_sum(all_counts[:runtime.rank], 0), num=len(counts))

        def gradient(*upstream):
            return [_own_rows(runtime, grad, start, start + count, count) * tf.cast(runtime.size, grad.dtype) if _is_differentiable(grad) else None
                    for grad, start, count in zip(upstream, starts, counts, strict=True)]

        return rows, gradient

    return _list(gather(*tensors))


def _own_rows(runtime: Sockets, whole: tf.Tensor, first: int | tf.Tensor, last: int | tf.Tensor, count: int | tf.Tensor) -> tf.Tensor:
    """whole[first:last], of which the first `count` rows are this worker's; the next worker's begin after these."""

    @tf.custom_gradient
    def own(whole):
        def gradient(upstream):
            rows = every_row(runtime, [upstream[:count]])[0] / tf.cast(runtime.size, upstream.dtype)
            rows.set_shape(whole.shape)
            return rows

        return whole[first:last], gradient

    return own(whole)


def _list(result: Any) -> list:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _has_rows(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.shape.rank != 0


def _is_differentiable(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_complex
