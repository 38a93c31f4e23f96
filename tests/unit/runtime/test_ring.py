"""The TCP ring, over real sockets; the ranks are threads of this process."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

from tfdist.runtime.ring import Ring, RingError, RingReducer


class Endpoints:
    """A rendezvous of threads in place of the runtime's collective."""

    def __init__(self, size):
        self.barrier, self.values = threading.Barrier(size), [""] * size

    def exchange(self, rank):
        def exchange(endpoint):
            self.values[rank] = endpoint
            self.barrier.wait()
            return list(self.values)

        return exchange


def on_every_rank(size, function, timeout=20.0):
    """[function(ring) of every rank]"""
    endpoints = Endpoints(size)

    def run(rank):
        ring = Ring(rank, size, "127.0.0.1", endpoints.exchange(rank), timeout)
        try:
            return function(ring)
        finally:
            ring.close()

    with ThreadPoolExecutor(size) as pool:
        return [future.result(timeout=60) for future in [pool.submit(run, rank) for rank in range(size)]]


def data(rank, count):
    return np.random.default_rng(rank).normal(size=count).astype("float32")


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 4, 1001, 1_000_003])
def test_all_reduce(size, count):
    def reduce(ring):
        array = data(ring.rank, count)
        for _ in range(2):
            ring.all_reduce(array)
        return array

    results = on_every_rank(size, reduce)
    np.testing.assert_allclose(results[0], size * sum(data(rank, count).astype("float64") for rank in range(size)), rtol=1e-5, atol=1e-5)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_gather_of_different_lengths(size):
    def gather(ring):
        return [ring.all_gather(bytes([ring.rank]) * length * ring.rank, "blocks") for length in (0, 1, 300_000)]

    for result in on_every_rank(size, gather):
        assert result == [[bytes([rank]) * length * rank for rank in range(size)] for length in (0, 1, 300_000)]


def test_ranks_that_gather_different_things_notice():
    def names(ring):
        with pytest.raises(RingError, match="is at '(first|second)', rank [01] at '(first|second)'"):
            ring.all_gather(b"", "first" if ring.rank else "second")

    def stamps(ring):
        with pytest.raises(RingError, match="DataError: Rank [01] and rank [01] hold different batches"):
            ring.all_gather(b"", "batches", ring.rank)

    on_every_rank(2, names)
    on_every_rank(2, stamps)


def test_ranks_that_reduce_different_things_notice():
    def reduce(ring):
        with pytest.raises(RingError, match="same program"):
            ring.all_reduce(np.zeros(4 if ring.rank else 5, np.float32))

    on_every_rank(2, reduce)


def test_a_neighbour_that_leaves_is_named():
    def reduce(ring):
        if ring.rank == 1:
            return
        with pytest.raises(RingError, match="rank 1"):
            ring.all_reduce(np.zeros(1 << 22, np.float32))

    on_every_rank(2, reduce)


def test_a_neighbour_that_is_stopped_is_named():
    """Silent, and not alive either: no need to wait for the time-out."""
    waiting, asked = threading.Event(), []

    def reduce(ring):
        if ring.rank == 1:
            waiting.wait(30)
            return
        ring.patience, ring.is_alive = 0.1, lambda rank: asked.append(rank) or len(asked) < 3
        try:
            with pytest.raises(RingError, match="rank 1 does not answer"):
                ring.all_reduce(np.zeros(10, np.float32))
        finally:
            waiting.set()

    on_every_rank(2, reduce)
    assert asked == [1, 1, 1]


def test_a_silent_neighbour_is_named_after_the_timeout():
    waiting = threading.Event()

    def reduce(ring):
        if ring.rank == 1:
            waiting.wait(30)
            return
        try:
            with pytest.raises(RingError, match="rank 1 was silent for 0.2 s"):
                ring.all_reduce(np.zeros(10, np.float32))
        finally:
            waiting.set()

    on_every_rank(2, reduce, timeout=0.2)


@pytest.mark.parametrize("bucket_bytes", [0, 4096, 1 << 30])
def test_reducer_keeps_results_that_are_still_in_use(bucket_bytes):
    """Several reductions, each fed by the one before, all results kept: buffers must not be used again too early.

    Eager, because both ranks live in this process, where one rank's waiting could take the other's only thread.
    """
    shapes = [(100, 7), (), (3,), (64, 64), (1,)]

    def steps(ring):
        reducer = RingReducer(ring, bucket_bytes)
        current = [tf.constant(data(ring.rank + 10 * index, int(np.prod(shape))).reshape(shape)) for index, shape in enumerate(shapes)]
        history = []
        for _ in range(3):
            current = [tensor / 2 for tensor in reducer(current)]
            history.append(reducer(current))
        return [[tensor.numpy() for tensor in step] for step in history]

    results = on_every_rank(2, steps)
    for index, shape in enumerate(shapes):
        mean = (data(10 * index, int(np.prod(shape))) + data(1 + 10 * index, int(np.prod(shape)))).reshape(shape) / 2
        for step in range(3):
            np.testing.assert_allclose(results[0][step][index], 2 * mean, rtol=1e-6)
            np.testing.assert_array_equal(results[0][step][index], results[1][step][index])
