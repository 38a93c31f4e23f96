"""Gathers rows through TensorFlow's collectives, where the number of rows differs between workers and between calls.

The collectives need the same shape from all workers, and the same each time: TensorFlow requires a collective to keep
its first shape. So workers first tell each other how many rows they have, over the ring of connections. Then all pad
their rows to the longest; and a call has a separate number for each length. As lengths may never repeat (rows of a
table chosen by a condition), lengths after the first few are rounded up.

Legend. k: tensors that are gathered together; R: workers.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.runtime.collectives import Group
from tfdist.runtime.host import on_host
from tfdist.runtime.ring.control_ring import ControlRing
from tfdist.runtime.wire_types import joined, of_one_type, off_wire, on_wire

_EXACT = 8  # shapes per call, before lengths are rounded up by at most an eighth
_WIRE_TYPES = 3


class Rows(NamedTuple):
    """The values that workers have agreed on for one gather; all on the host."""

    counts: tf.Tensor  # int32 [R, k]: rows of each worker
    longest: tf.Tensor  # int32 [k]: number of rows that each worker sends
    number: tf.Tensor  # int32 []: the first of _WIRE_TYPES numbers for collectives of these shapes


class RowExchange:
    """Gathers varying numbers of rows. All workers make the same calls in the same order. `group`: for this alone."""

    def __init__(self, control: ControlRing, group: Group):
        self._control, self._group = control, group
        self._sites = itertools.count()
        self._numbers = itertools.count(1, _WIRE_TYPES)
        self._known: dict[tuple, dict[tuple, int]] = defaultdict(dict)  # call -> shapes -> number

    def agree(
        self,
        tensors: Sequence[tf.Tensor],
        same: Sequence[tf.Tensor],
        stamp: Callable[[], int],
        after: Sequence[tf.Operation],
    ) -> Rows:
        """Agrees on rows, see PeerRuntime.gather. Blocks a thread until all have come; runs after `after`."""
        k = len(tensors)
        # Eager calls, outside of a graph, are distinguished by their dtypes only.
        site = tuple(tensor.dtype for tensor in tensors) if tf.executing_eagerly() else (next(self._sites),)
        with tf.control_dependencies(list(after)), on_host():
            shapes = [tf.shape(tensor, tf.int64) for tensor in tensors]
            sizes = tf.stack([[shape[0] for shape in shapes], [tf.reduce_prod(shape[1:]) for shape in shapes]])
            agreed = tf.numpy_function(functools.partial(self._meet, site, stamp), [sizes, *same], tf.int32)
            agreed = tf.ensure_shape(agreed, [self._group.size * k + k + 1])
            counts, longest, number = tf.split(agreed, [self._group.size * k, k, 1])
            return Rows(tf.reshape(counts, [self._group.size, k]), longest, number[0])

    def gather(self, tensors: Sequence[tf.Tensor], rows: Rows) -> list[tf.Tensor]:
        """Returns the rows of all workers for each tensor, in rank order."""
        with on_host():
            of_ranks = [tf.unstack(counts) for counts in tf.unstack(rows.counts, axis=1)]
            longest = tf.unstack(rows.longest)
        wire = [on_wire(tensor) for tensor in tensors]
        padded = [_padded(tensor, length) for tensor, length in zip(wire, longest, strict=True)]
        found: list[tf.Tensor] = list(tensors)
        for index, places in enumerate(of_one_type(wire)):
            with on_host():
                number = rows.number + index
            lengths = [tf.size(padded[place]) for place in places]
            # One extra element, as there may be no other.
            flat = joined([*(padded[place] for place in places), tf.zeros([1], wire[places[0]].dtype)])
            all_flat = self._group.all_gather_numbered(flat[tf.newaxis], number)
            for place, part in zip(places, tf.split(all_flat, [*lengths, 1], axis=1), strict=False):
                stack = tf.reshape(part, tf.concat([[self._group.size], tf.shape(padded[place])], 0))
                parts = [stack[rank, :count] for rank, count in enumerate(of_ranks[place])]
                found[place] = off_wire(tf.concat(parts, 0), tensors[place].dtype)
        return found

    def _meet(self, site: tuple, stamp: Callable[[], int], sizes: np.ndarray, *same: np.ndarray) -> np.ndarray:
        blocks = self._control.gather_batches([sizes], stamp(), same)
        all_sizes = np.stack([np.frombuffer(block, np.int64).reshape(sizes.shape) for block in blocks])  # [R, 2, k]
        counts = all_sizes[:, 0]
        known = self._known[site]
        longest = counts.max(0)
        if (*longest, *sizes[1]) not in known and len(known) >= _EXACT:
            longest = np.array([_rounded_up(int(length)) for length in longest])
        shapes = (*longest, *sizes[1])
        if shapes not in known:
            known[shapes] = next(self._numbers)
        return np.concatenate([counts.reshape(-1), longest, [known[shapes]]]).astype(np.int32)


def _rounded_up(length: int) -> int:
    unit = 1 << max(0, length.bit_length() - 4)
    return -(-length // unit) * unit


def _padded(rows: tf.Tensor, length: tf.Tensor) -> tf.Tensor:
    """Pads the rows with rows of zeros at the end to `length` rows."""
    more = tf.stack([[0, length - tf.shape(rows)[0]], *([0, 0] for _ in rows.shape[1:])])
    padded = tf.pad(rows, more)
    padded.set_shape([None, *rows.shape[1:]])
    return padded
