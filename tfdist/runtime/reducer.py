"""Sums gradients over workers inside a tf.function, through a Ring: in buckets, while the backward pass continues.

If few rows of a table were looked up, only those rows travel (tf.IndexedSlices), not the table.
"""

from __future__ import annotations

import functools
import math
import queue
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.runtime.bucketing import in_buckets
from tfdist.runtime.host import as_list, on_host
from tfdist.runtime.ring.ring import Ring
from tfdist.runtime.ring.ring_error import MARK, RingError

_SUM, _HALVED, _ROWS = "sum", "sum of what travels as bfloat16", "rows of all workers"
_ALIGN = 16  # float32 elements: 64 bytes, the alignment that TensorFlow needs to take an array without a copy
_TWICE_BYTES = 64 << 20  # calls with tensors up to this size may use separate buffers for the sums, which saves waiting
_UNUSED_REFERENCES = 3  # the pool's list, the loop variable, and getrefcount's argument


class RingReducer:
    """`Ring.all_reduce`, and for slices `Ring.gather`, for lists of tensors inside a tf.function: in buckets, by a
    separate thread.

    One start operation per bucket copies its gradients into a buffer and returns at once; one finish operation waits
    for all buckets. The thread takes the buckets in one fixed order, so it does not matter in which order TensorFlow
    runs the start operations on each worker.
    """

    def __init__(self, ring: Ring, bucket_bytes: int):
        self.ring, self.bucket_bytes = ring, max(bucket_bytes, 1)
        self.travel_s = self.wait_s = (
            # seconds with a bucket under way; seconds of waiting for a result after all own gradients were handed over
            0.0
        )
        self._sites = 0
        # Rounds under way: site -> buckets that were handed over. A step that fails leaves them here.
        self._open: dict[_Site, set[int]] = {}
        self._work: queue.SimpleQueue[_Site] = queue.SimpleQueue()
        self._pool: dict[int, list[np.ndarray]] = {}
        self._pool_lock = threading.Lock()
        self._failure: Exception | None = None
        threading.Thread(target=self._serve, name="tfdist-ring", daemon=True).start()

    def __call__(self, tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[Any]:
        """Returns the sum over all workers of each tensor, of its type; each must pass `suits`.

        Called while tracing; every worker must trace the same calls.
        """
        wire = [_on_wire(tensor) for tensor in tensors]
        kinds = [
            _ROWS if len(parts) > 1 else _HALVED if parts[0].dtype == tf.bfloat16 else _SUM
            for parts in wire
            for _ in parts
        ]
        sums = iter(self._combine([part for parts in wire for part in parts], kinds))
        return [_off_wire([next(sums) for _ in parts], tensor) for parts, tensor in zip(wire, tensors, strict=True)]

    def _combine(self, tensors: list[tf.Tensor], kinds: list[str]) -> list[tf.Tensor]:
        """Returns for each tensor, float32: the sum, the sum of values that travel as bfloat16, or the rows of all
        workers, in rank order."""
        self.must_be_idle()  # no step runs while another one is traced
        site = _Site(
            self._sites,
            [tuple(tensor.shape) for tensor in tensors],
            self.bucket_bytes,
            kinds,
            self.ring.rank,
            self.ring.size,
        )
        self._sites += 1
        with on_host():
            started = [
                tf.numpy_function(
                    functools.partial(self._start, site, number), [tensors[index] for index in members], tf.int32
                )
                for number, members in enumerate(site.buckets)
            ]
        with tf.control_dependencies(started), on_host():
            reduced = as_list(tf.numpy_function(functools.partial(self._finish, site), [], [tf.float32] * len(tensors)))
        for index, value in enumerate(reduced):
            value.set_shape(site.result_shape(index))
        return reduced

    def must_be_idle(self) -> None:
        """Between steps: raises an error if a step failed after it had handed over some of its gradients. The thread
        waits for the others, and what comes next would wait for the thread, or get gradients of both steps."""
        if self._open:
            raise self._left_open()

    def _left_open(self) -> Exception:
        rank = self.ring.rank
        return self._failure or RingError(
            f"{MARK}rank {rank} goes on after a step that failed in the middle of its backward pass."
        )

    def _start(self, site: _Site, number: int, *arrays: np.ndarray) -> np.int32:
        handed_over = self._open.setdefault(site, set())
        if number in handed_over:  # in an earlier round
            raise self._left_open()
        handed_over.add(number)
        buffer = self._free_buffer(site.lengths[number])
        for index, array in zip(site.buckets[number], arrays, strict=True):
            site.own(buffer, index)[...] = array
        site.started[number].put(buffer)
        if number == 0:  # nothing can be sent before the first bucket is ready
            self._work.put(site)
        return np.int32(0)

    def _finish(self, site: _Site) -> list[np.ndarray]:
        self._open.pop(site, None)
        reduced: list = [None] * len(site.shapes)
        begun = time.monotonic()
        for members in site.buckets:
            buffer = site.done.get()
            if buffer is None:
                raise self._failure or RuntimeError("a bucket without a result")
            for index in members:
                reduced[index] = site.result(buffer, index)
        self.wait_s += time.monotonic() - begun
        return reduced

    def _serve(self) -> None:
        while True:
            site = self._work.get()
            for number in range(len(site.buckets)):
                buffer = site.started[number].get()
                begun = time.monotonic()
                try:
                    if self._failure is None:
                        if site.kinds[number] == _ROWS:
                            self.ring.gather(buffer, site.number, number)
                        else:
                            buffer = self.ring.all_reduce(
                                buffer,
                                site.number,
                                number,
                                halved=site.kinds[number] == _HALVED,
                                spare=self._free_buffer if site.bytes <= _TWICE_BYTES else None,
                            )
                except Exception as error:  # noqa: BLE001 - raised again where the result is awaited
                    self._failure = error
                self.travel_s += time.monotonic() - begun
                site.done.put(buffer if self._failure is None else None)

    def _free_buffer(self, length: int) -> np.ndarray:
        """Returns an aligned float32 [length], zeroed or used before. TensorFlow takes results without a copy and keeps
        references to them, so a buffer is free when only the pool refers to it.

        It must not be a slice of another array: NumPy lets views of a slice refer to the whole array, so these
        references would not be counted.
        """
        with self._pool_lock:
            pool = self._pool.setdefault(length, [])
            for buffer in pool:
                if sys.getrefcount(buffer) == _UNUSED_REFERENCES:
                    return buffer
            pool.append(self.ring.empty(length))
            return pool[-1]


class _Site:
    """One call of the reducer in the program: the layout of its tensors in buckets, and the queues of a round.

    All tensors of a bucket are of one kind. A bucket whose rows are gathered has a part for each rank, of length
    `length / size`.
    """

    def __init__(
        self,
        number: int,
        shapes: list[tuple],
        bucket_bytes: int,
        kinds: Sequence[str],
        rank: int,
        size: int,
    ):
        # Ranks compare it when they meet: what is reduced here, and its shapes, as 16 and 16 bits.
        self.number = number | zlib.crc32(repr(shapes).encode()) << 16 & 0xFFFF0000
        self.shapes, self.rank, self.size = shapes, rank, size
        kinds = kinds or [_SUM] * len(shapes)
        self.buckets = in_buckets([4 * math.prod(shape) for shape in shapes], bucket_bytes, kinds, 4 * _ALIGN)
        self._offsets, self.lengths = {}, []
        for members in self.buckets:
            length = 0
            for index in members:
                self._offsets[index] = length
                length += -(-math.prod(shapes[index]) // _ALIGN) * _ALIGN
            self.lengths.append(length)
        self.kinds = [kinds[members[0]] for members in self.buckets]
        self._parts = {
            index: length
            for kind, length, members in zip(self.kinds, self.lengths, self.buckets, strict=True)
            if kind == _ROWS
            for index in members
        }
        self.lengths = [
            length * (size if kind == _ROWS else 1) for kind, length in zip(self.kinds, self.lengths, strict=True)
        ]
        self.bytes = 4 * sum(self.lengths)
        self.started = [queue.SimpleQueue() for _ in self.buckets]
        self.done: queue.SimpleQueue = queue.SimpleQueue()

    def own(self, buffer: np.ndarray, index: int) -> np.ndarray:
        """The part of its bucket's buffer that holds this worker's tensor `index`."""
        start = self._offsets[index] + self.rank * self._parts.get(index, 0)
        return buffer[start : start + math.prod(self.shapes[index])].reshape(self.shapes[index])

    def result(self, buffer: np.ndarray, index: int) -> np.ndarray:
        """The result for tensor `index`: the sum, in place, or a copy of the rows of all workers."""
        if index not in self._parts:
            return self.own(buffer, index)
        start = self._offsets[index]
        return buffer.reshape(self.size, -1)[:, start : start + math.prod(self.shapes[index])].reshape(
            self.result_shape(index)
        )

    def result_shape(self, index: int) -> tuple:
        """The shape of the array that `result` returns."""
        shape = self.shapes[index]
        return (self.size * shape[0], *shape[1:]) if index in self._parts else shape


def suits(tensor: tf.Tensor | tf.IndexedSlices) -> bool:
    """Whether the reducer takes the tensor: float32 or bfloat16 of a static shape; float32 slices of a static shape."""
    sparse = isinstance(tensor, tf.IndexedSlices)
    values = tensor.values if sparse else tensor
    return values.dtype in ((tf.float32,) if sparse else (tf.float32, tf.bfloat16)) and values.shape.is_fully_defined()


def _on_wire(tensor: tf.Tensor | tf.IndexedSlices) -> list[tf.Tensor]:
    """Returns the tensor to be summed, or, for slices, two tensors whose rows are gathered: that only copies, so any 32
    bits may travel as float32. An index of a table with 2^31 rows or more takes two of them.
    """
    if isinstance(tensor, tf.IndexedSlices):
        indices = tf.ensure_shape(tf.cast(tensor.indices, _index_type(tensor)), tensor.values.shape[:1])
        return [tensor.values, tf.bitcast(indices, tf.float32)]
    return [tensor]


def _off_wire(parts: list[tf.Tensor], like: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tf.IndexedSlices:
    if isinstance(like, tf.IndexedSlices):
        indices = tf.bitcast(parts[1], _index_type(like))
        return tf.IndexedSlices(parts[0], tf.cast(indices, like.indices.dtype), like.dense_shape)
    return tf.cast(parts[0], like.dtype)  # exact: the ring has rounded the sum of what travels as bfloat16


def _index_type(slices: tf.IndexedSlices) -> tf.DType:
    rows = slices.shape[0] if slices.shape.rank else None
    return tf.int32 if rows is not None and rows < 2**31 else tf.int64
