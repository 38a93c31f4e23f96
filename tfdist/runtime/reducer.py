"""Sums of gradients over workers inside a tf.function, by a Ring: in buckets, while the backward pass goes on."""

from __future__ import annotations

import functools
import math
import queue
import sys
import threading
import time

import numpy as np
import tensorflow as tf

from tfdist.runtime.ring import Ring

_ALIGN = 16  # float32 elements: 64 bytes, what TensorFlow needs to take an array without a copy
_UNUSED_REFERENCES = 3  # the pool's list, the loop variable, and getrefcount's argument


class RingReducer:
    """`Ring.all_reduce` for lists of tensors inside a tf.function: in buckets, by a thread of its own.

    A start operation per bucket copies its gradients into a buffer and returns at once; one finish operation waits for
    all. The thread takes the buckets in one fixed order, so it does not matter in which order TensorFlow on each
    worker happens to run the start operations.
    """

    def __init__(self, ring: Ring, bucket_bytes: int):
        self.ring, self.bucket_bytes = ring, max(bucket_bytes, 1)
        self.travel_s = self.wait_s = 0.0  # in which a bucket was under way; in which all own gradients were handed over and a result was waited for
        self._sites = 0
        self._work: queue.SimpleQueue[_Site] = queue.SimpleQueue()
        self._pool: dict[int, list[np.ndarray]] = {}
        self._failure: Exception | None = None
        threading.Thread(target=self._serve, name="tfdist-ring", daemon=True).start()

    def __call__(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """The sum of each float32 tensor over all workers. Called while tracing; every worker traces the same."""
        site = _Site(self._sites, [tuple(tensor.shape) for tensor in tensors], self.bucket_bytes)
        self._sites += 1
        started = [
            tf.numpy_function(functools.partial(self._start, site, number), [tensors[index] for index in members], tf.int32)
            for number, members in enumerate(site.buckets)]
        with tf.control_dependencies(started):
            reduced = tf.numpy_function(functools.partial(self._finish, site), [], [tf.float32] * len(tensors))
        for value, tensor in zip(reduced, tensors, strict=True):
            value.set_shape(tensor.shape)
        return reduced

    def _start(self, site: _Site, number: int, *arrays: np.ndarray) -> np.int32:
        buffer = self._free_buffer(site.lengths[number])
        for index, array in zip(site.buckets[number], arrays, strict=True):
            site.view(buffer, index)[...] = array
        site.started[number].put(buffer)
        if number == 0:  # nothing can be sent before the first bucket is there
            self._work.put(site)
        return np.int32(0)

    def _finish(self, site: _Site) -> list[np.ndarray]:
        reduced: list = [None] * len(site.shapes)
        begun = time.monotonic()
        for members in site.buckets:
            buffer = site.done.get()
            if buffer is None:
                raise self._failure
            for index in members:
                reduced[index] = site.view(buffer, index)
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
                        self.ring.all_reduce(buffer, site.number, number)
                except Exception as error:  # noqa: BLE001 - raised again where the result is waited for
                    self._failure = error
                self.travel_s += time.monotonic() - begun
                site.done.put(buffer if self._failure is None else None)

    def _free_buffer(self, length: int) -> np.ndarray:
        """A zeroed or used float32 [length], aligned. TensorFlow takes results without a copy and holds on to them, so
        a buffer is free when nobody but the pool refers to it.

        It must not be a slice of another array: NumPy lets views of a slice refer to the whole, so they would not count.
        """
        pool = self._pool.setdefault(length, [])
        for buffer in pool:
            if sys.getrefcount(buffer) == _UNUSED_REFERENCES:
                return buffer
        pool.append(self.ring.empty(length))
        return pool[-1]


class _Site:
    """One call of the reducer in the program: how its tensors are laid out in buckets, and the queues of a round."""

    def __init__(self, number: int, shapes: list[tuple], bucket_bytes: int):
        self.number, self.shapes = number, shapes
        sizes = [math.prod(shape) for shape in shapes]
        # The backward pass makes the last variables' gradients first.
        self.buckets: list[list[int]] = [[]]
        self._offsets, self.lengths = {}, [0]
        for index in reversed(range(len(shapes))):
            if self.buckets[-1] and (self.lengths[-1] + sizes[index]) * 4 > bucket_bytes:
                self.buckets.append([])
                self.lengths.append(0)
            self.buckets[-1].append(index)
            self._offsets[index] = self.lengths[-1]
            self.lengths[-1] += -(-sizes[index] // _ALIGN) * _ALIGN
        self.started = [queue.SimpleQueue() for _ in self.buckets]
        self.done: queue.SimpleQueue = queue.SimpleQueue()

    def view(self, buffer: np.ndarray, index: int) -> np.ndarray:
        """The part of its bucket's buffer that holds tensor `index`."""
        start, shape = self._offsets[index], self.shapes[index]
        return buffer[start:start + math.prod(shape)].reshape(shape)
