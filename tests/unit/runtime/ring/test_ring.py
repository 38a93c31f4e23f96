"""The TCP ring, over real sockets; the ranks are threads of this process."""

import itertools
import os
import socket
import struct
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import PeerLostError
from tfdist.runtime.multi_worker import MultiWorker
from tfdist.runtime.reducer import RingReducer, _Site
from tfdist.runtime.ring import array_meeting
from tfdist.runtime.ring.ring import Ring
from tfdist.runtime.ring.ring_connections import Patience
from tfdist.runtime.ring.ring_error import RingError
from tfdist.runtime.ring.shared_memory import OthersArrays, SharedArrays


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


def place(rank, size):
    peers = tuple(f"127.0.0.1:{2000 + rank}" for rank in range(size))
    return Cluster("worker", rank, rank, size, peers, {"worker": list(peers)})


def on_every_rank(size, function, timeout=20.0, share=False):
    """[function(ring) of every rank]"""
    endpoints = Endpoints(size)

    def run(rank):
        ring = Ring(place(rank, size), endpoints.exchange(rank), Patience(timeout), share=share)
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
    np.testing.assert_allclose(
        results[0], size * sum(data(rank, count).astype("float64") for rank in range(size)), rtol=1e-5, atol=1e-5
    )
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("shared", [range(5), (0,), (1, 2)])
def test_arrays_read_in_place_give_the_same_bits(size, shared):
    """shared: the ranks whose arrays the next rank reads in place; the others send theirs."""

    def reduce(ring, in_place):
        histories = []
        for _ in range(2):  # two arrays, the second while the first is known already
            array = ring.empty(10_007) if in_place and ring.rank in shared else np.empty(10_007, np.float32)
            for turn in range(3):
                array[:] = data(ring.rank + 10 * turn, 10_007)
                ring.all_reduce(array)
                histories.append(array.copy())
        return histories

    sent = on_every_rank(size, lambda ring: reduce(ring, False))
    read = on_every_rank(
        size, lambda ring: reduce(ring, ring.shares or pytest.fail("this system can share memory")), share=True
    )
    np.testing.assert_array_equal(read, sent)


@pytest.mark.parametrize("hosts", ["AABB", "ABAB", "AAB"])
@pytest.mark.parametrize("how", ["sum", "halved", "gather"])
def test_workers_on_several_hosts_read_only_what_is_on_their_own(hosts, how, monkeypatch):
    """Of the arrays of another host, a rank knows a process number and a descriptor that mean something else here."""
    host_of_token = {}

    class Shared(SharedArrays):
        def offer(self):
            host_of_token[self._token] = here.host
            return super().offer()

    class Others(OthersArrays):
        def __init__(self, offer):
            pid, descriptor, token = struct.unpack("!QQ16s", offer)
            there = pid if host_of_token[token] == here.host else 2**22 + 1
            super().__init__(struct.pack("!QQ16s", there, descriptor, token))

    here, size, count = threading.local(), len(hosts), 300_000  # so many that they are not summed by doubling
    monkeypatch.setattr(array_meeting, "SharedArrays", Shared)
    monkeypatch.setattr(array_meeting, "OthersArrays", Others)
    endpoints = Endpoints(size)

    def run(rank):
        here.host = hosts[rank]
        ring = Ring(place(rank, size), endpoints.exchange(rank), Patience(20.0), share=True)
        try:
            found = []
            for turn in range(2):
                array = ring.empty(size * count if how == "gather" else count)
                part = array[rank * count :][:count] if how == "gather" else array
                part[:] = 10**rank + turn
                ring.gather(array) if how == "gather" else ring.all_reduce(array, halved=how == "halved")
                found.append(array.copy())
            return found
        finally:
            ring.close()

    with ThreadPoolExecutor(size) as pool:
        results = [future.result(timeout=60) for future in [pool.submit(run, rank) for rank in range(size)]]
    for result in results:
        for turn, array in enumerate(result):
            parts = [10.0**rank + turn for rank in range(size)]
            expected = np.repeat(parts, count) if how == "gather" else np.full(count, sum(parts))
            np.testing.assert_allclose(array, expected, rtol=0.02 if how == "halved" else 0)


@pytest.mark.parametrize("count", [0, 1, 1001, 1_000_003])
@pytest.mark.parametrize("shared", [(0, 1), (1,), *(pytest.param(who, marks=pytest.mark.slow) for who in ((), (0,)))])
def test_two_ranks_that_have_spare_arrays_get_the_same_bits(count, shared):
    """shared: the ranks whose arrays the other reads in place. An array that is given away changes when it is free."""

    def reduce(ring, spares):
        pool, sums = [], []

        def spare(length):
            for array in pool:
                if sys.getrefcount(array) == 3:
                    return array
            pool.append(ring.empty(length) if ring.rank in shared else np.empty(length, np.float32))
            return pool[-1]

        for turn in range(6):
            array = spare(count)
            array[:] = data(ring.rank + 10 * turn, count)
            if turn % 2 == ring.rank:  # so that either is sometimes late
                time.sleep(0.02)
            total = ring.all_reduce(array, bucket=turn, spare=spare if spares else None)
            sums.append(total.copy())
            if turn == 3:
                ring.all_gather(b"between", "test")
                rows = np.full(2, float(ring.rank), np.float32)
                ring.gather(rows)
                np.testing.assert_array_equal(rows, [0, 1])
            del array, total
        return len(pool), sums

    alone = [sums for _, sums in on_every_rank(2, lambda ring: reduce(ring, False), share=bool(shared))]
    found = on_every_rank(2, lambda ring: reduce(ring, True), share=bool(shared))
    for pooled, sums in found:
        assert pooled <= 3, pooled  # this array, its sum, and one that may still be read
        for one, other in zip(sums, alone[0], strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("share", [False, True])
def test_two_ranks_have_the_same_bits_of_not_a_number(share):
    """Two kinds of NaN: a sum of both has the bits of one of them."""

    def reduce(ring):
        array = ring.empty(4)
        array.view(np.uint32)[:] = 0x7FC00001 + ring.rank
        return ring.all_reduce(array, spare=ring.empty).view(np.uint32).copy()

    np.testing.assert_array_equal(*on_every_rank(2, reduce, share=share))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("share", [False, True])
def test_numbers_that_are_not_finite_are_added_up_quietly(size, share):
    def reduce(ring):
        array = ring.empty(6)
        array[:] = np.float32([np.inf, 3e38, 1, -np.inf, 3e38, 1]) * (1 if ring.rank else -1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return ring.all_reduce(array, spare=ring.empty).copy()

    found = on_every_rank(size, reduce, share=share)
    assert np.isnan(found[0][0]) and found[0][2] == size - 2


def test_two_ranks_wait_for_each_other_once_an_array():
    def reduce(ring):
        passed, pass_on = [], ring._pass_on
        ring._pass_on = lambda outgoing, incoming, *others, **named: (
            passed.append(len(incoming)),
            pass_on(outgoing, incoming, *others, **named),
        )
        for _ in range(5):
            ring.all_reduce(ring.empty(1000), spare=ring.empty)
        return sum(map(bool, passed))

    # Once for the other's array, and, but for the first, for word that the last one has been read.
    assert on_every_rank(2, reduce, share=True) == [9, 9]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 1001])
@pytest.mark.parametrize("shared", [(), range(5), (1, 2)])
def test_small_sums(size, count, shared):
    """Half the bytes; the same bits on all ranks, also where some of them read in place; nothing lost but a few
    roundings.
    """
    mine = [data(rank, count).astype(ml_dtypes.bfloat16).astype("float32") for rank in range(size)]
    whole = sum(array.astype("float64") for array in mine)
    sent = []

    def reduce(ring):
        array = ring.empty(count) if ring.rank in shared else np.empty(count, np.float32)
        pass_on = ring._pass_on
        ring._pass_on = lambda outgoing, *others, **named: (
            sent.append(len(outgoing)),
            pass_on(outgoing, *others, **named),
        )
        for _ in range(2):
            array[:] = mine[ring.rank]
            ring.all_reduce(array, halved=True)
        return array.copy()

    results = on_every_rank(size, reduce, share=bool(shared))
    for result in results:
        np.testing.assert_array_equal(result, results[0])
    np.testing.assert_array_equal(results[0].astype(ml_dtypes.bfloat16).astype("float32"), results[0])
    largest = np.abs(np.stack([np.zeros(count), *mine])).sum(0)
    assert (np.abs(results[0] - whole) <= size * 2.0**-8 * largest).all()
    if size == 2:
        np.testing.assert_array_equal(results[0], (mine[0] + mine[1]).astype(ml_dtypes.bfloat16).astype("float32"))
    if not shared and count > 1000:
        assert sum(length for length in sent if length > 40) == 2 * 2 * (size - 1) * 2 * count, sorted(set(sent))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("share", [False, True])
def test_gather(size, share):
    """Any 32 bits arrive: here NaN with a payload, and denormal numbers."""

    def gather(ring):
        parts = ring.empty(size * 1003).reshape(size, -1)
        for turn in range(3):
            parts.view(np.int32)[ring.rank] = np.arange(1003) + 1003 * ring.rank + (0x7FC00000 if turn == 1 else 0)
            ring.gather(parts.reshape(-1))
            np.testing.assert_array_equal(
                parts.view(np.int32).reshape(-1), np.arange(size * 1003) + (0x7FC00000 if turn == 1 else 0)
            )
            parts[:] = np.nan

    on_every_rank(size, gather, share=share)


def test_an_array_is_not_changed_before_it_has_been_read():
    """Every rank spoils its array as soon as its all-reduce has ended."""

    def reduce(ring):
        array, sums = ring.empty(50_000), []
        for turn in range(50):
            array[:] = turn + ring.rank
            ring.all_reduce(array)
            sums.append((array.min(), array.max()))
            array[:] = np.nan
        return sums

    for result in on_every_rank(3, reduce, share=True):
        assert result == [(3 * turn + 3, 3 * turn + 3) for turn in range(50)]


def test_shared_arrays_keep_no_descriptors():
    def reduce(ring):
        ring.all_reduce(ring.empty(10))
        before.append(len(os.listdir("/proc/self/fd")))
        for _ in range(20):
            ring.all_reduce(ring.empty(10))
        after.append(len(os.listdir("/proc/self/fd")))

    before, after = [], []
    on_every_rank(2, reduce, share=True)
    assert min(after) <= max(before) + 4  # the other rank may be in the middle of one


def test_memory_of_another_kind_of_process_is_not_read():
    offer = bytearray(SharedArrays().offer())
    assert OthersArrays(bytes(offer)).readable
    offer[-1] ^= 1  # a process of that number here, that is not the one meant
    assert not OthersArrays(bytes(offer)).readable
    offer[:8] = (2**22 + 1).to_bytes(8, "big")  # no such process here: it is on another host
    assert not OthersArrays(bytes(offer)).readable


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
        with pytest.raises(RingError, match="DataError: Rank [01] and rank [01] have different batches"):
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
        ring.patience = Patience(20.0, lambda rank: asked.append(rank) or len(asked) < 3, 0.1)
        try:
            with pytest.raises(RingError, match="rank 1 no longer answers"):
                ring.all_reduce(np.zeros(10, np.float32))
        finally:
            waiting.set()

    on_every_rank(2, reduce)
    assert asked == [1, 1, 1]


def test_a_silent_neighbour_is_looked_at_more_than_once_before_it_counts_as_dead():
    """One look when the time is over may come a moment too early; the next would come after as long again."""
    waiting, looks = threading.Event(), []

    def reduce(ring):
        if ring.rank == 1:
            waiting.wait(30)
            return
        begun = time.monotonic()
        ring.patience = Patience(20.0, lambda rank: looks.append(rank) or time.monotonic() - begun < 1.0, 1.0)
        try:
            with pytest.raises(RingError, match="rank 1 no longer answers"):
                ring.all_reduce(np.zeros(10, np.float32))
        finally:
            waiting.set()

    on_every_rank(2, reduce)
    assert len(looks) > 1


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


def test_ranks_tell_shapes_apart_that_take_as_many_bytes():
    """Parts begin at multiples of 64 bytes."""
    one, other = (_Site(3, [(2,), (rows, 4)], 1 << 20, kinds=(), rank=0, size=3) for rows in (2, 3))
    assert one.lengths == other.lengths and one.number != other.number
    assert one.number == _Site(3, [(2,), (2, 4)], 1 << 20, kinds=(), rank=1, size=3).number < 1 << 32


def test_ranks_meet_for_any_site_and_bucket():
    """Their names were cut from bucket 4096 on: a rank found that it was elsewhere than itself."""

    def reduce(ring):
        return ring.all_reduce(np.ones(4, np.float32), site=2**32 - 1, bucket=10**6)

    assert all((summed == 3).all() for summed in on_every_rank(3, reduce))


@pytest.mark.parametrize("share", [False, True])
def test_a_buffer_in_use_is_not_given_out_again(share):
    def reduce(ring):
        reducer, site = RingReducer(ring, 1 << 20), _Site(0, [(5,), (7,)], 1 << 20, kinds=(), rank=0, size=1)
        buffer = reducer._free_buffer(site.lengths[0])
        used = site.own(buffer, 1)  # as TensorFlow holds it
        del buffer
        other = reducer._free_buffer(site.lengths[0])
        assert not np.shares_memory(used, other)
        del used
        again = reducer._free_buffer(site.lengths[0])
        assert again is not other and len(reducer._pool[site.lengths[0]]) == 2

    on_every_rank(2, reduce, share=share)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("bucket_bytes", [0, 4096, 1 << 30])
def test_reducer_keeps_results_that_are_still_in_use(bucket_bytes, share):
    """Several reductions, each fed by the one before, all results kept: buffers must not be used again too early.

    Eager, because both ranks live in this process, where one rank's waiting could take the other's only thread.
    """
    shapes = [(100, 7), (), (3,), (64, 64), (1,)]

    def steps(ring):
        reducer = RingReducer(ring, bucket_bytes)
        current = [
            tf.constant(data(ring.rank + 10 * index, int(np.prod(shape))).reshape(shape))
            for index, shape in enumerate(shapes)
        ]
        history = []
        for _ in range(3):
            current = [tensor / 2 for tensor in reducer(current)]
            history.append(reducer(current))
        return [[tensor.numpy() for tensor in step] for step in history]

    results = on_every_rank(2, steps, share=share)
    for index, shape in enumerate(shapes):
        mean = (data(10 * index, int(np.prod(shape))) + data(1 + 10 * index, int(np.prod(shape)))).reshape(shape) / 2
        for step in range(3):
            np.testing.assert_allclose(results[0][step][index], 2 * mean, rtol=1e-6)
            np.testing.assert_array_equal(results[0][step][index], results[1][step][index])


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("bucket_bytes", [0, 4096, 1 << 30])
def test_reducer_takes_all_kinds(bucket_bytes, share):
    """Sums, rows of tables, and sums of bfloat16; several times with the same buffers."""
    rows, width = 37, 5

    def steps(ring):
        reducer, found = RingReducer(ring, bucket_bytes), []
        for turn in range(3):
            random = np.random.default_rng([ring.rank, turn])
            slices = tf.IndexedSlices(
                tf.constant(random.normal(size=(rows, width)), tf.float32),
                tf.constant(random.integers(0, 2**31 - 1, rows)),
                tf.constant([2**31 - 1, width], tf.int64),
            )
            found.append(
                reducer(
                    [
                        tf.ones([300, 3]) * ring.rank,
                        slices,
                        tf.ones([300, 2], tf.bfloat16) * (ring.rank + 2),
                        tf.ones([2]),
                    ]
                )
            )
        return found

    results = on_every_rank(3, steps, share=share)
    for result in results:
        for turn, (first, slices, small, last) in enumerate(result):
            randoms = [np.random.default_rng([rank, turn]) for rank in range(3)]
            values = [random.normal(size=(rows, width)).astype("float32") for random in randoms]
            np.testing.assert_array_equal(slices.values, np.concatenate(values))
            np.testing.assert_array_equal(
                slices.indices, np.concatenate([random.integers(0, 2**31 - 1, rows) for random in randoms])
            )
            assert slices.indices.dtype == tf.int64 and slices.dense_shape[0] == 2**31 - 1
            assert (first.numpy() == 3).all() and (last.numpy() == 3).all() and (small.numpy() == 9).all()
            assert small.dtype == tf.bfloat16  # as `tape.gradient` must return it for a bfloat16 variable


def test_what_comes_after_a_step_that_failed_in_the_middle_of_the_backward_pass_does_not_wait_for_it():
    """Nor does it get the failed step's gradients: neither in the same function nor in another one."""
    ones = [tf.ones([3]), tf.ones([4])]
    before_one_closes = threading.Barrier(2, timeout=20)  # or the other may say that it has lost contact

    def steps(ring):
        reducer, numbers = RingReducer(ring, 0), itertools.count()
        start = reducer._start

        def fails_once(site, number, *arrays):
            if next(numbers) == 1:
                raise ValueError("bad numbers")
            return start(site, number, *arrays)

        reducer._start = fails_once
        step = tf.function(lambda *tensors: reducer(tensors), autograph=False)
        with pytest.raises(tf.errors.OpError, match="bad numbers"):
            step(*ones)
        for what, error in (
            (lambda: step(*ones), tf.errors.OpError),
            (lambda: reducer(ones), RingError),
            (reducer.must_be_idle, RingError),
        ):
            with pytest.raises(error, match="ring: rank . goes on after a step that failed"):
                what()
        before_one_closes.wait()

    on_every_rank(2, steps)


@pytest.mark.parametrize("share", [False, True])
def test_reducer_takes_rows_of_tables_beyond_32_bits(share):
    numbers = np.array([0, 2**31, 2**40 + 7], np.int64)

    def steps(ring):
        values = tf.constant(data(ring.rank, 12).reshape(3, 4))
        slices = tf.IndexedSlices(values, tf.constant(numbers + ring.rank), tf.constant([2**41, 4], tf.int64))
        return RingReducer(ring, 1 << 20)([slices, tf.ones([3])])

    for slices, ones in on_every_rank(2, steps, share=share):
        np.testing.assert_array_equal(slices.indices, np.concatenate([numbers, numbers + 1]))
        np.testing.assert_array_equal(slices.values, np.concatenate([data(0, 12), data(1, 12)]).reshape(6, 4))
        assert (ones.numpy() == 2).all()


def test_a_neighbour_that_does_not_come_is_a_lost_peer(monkeypatch):
    monkeypatch.setattr("tfdist.runtime.ring.ring_meeting._MEETING_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection, says nothing

        def gather(row):
            other = f"127.0.0.1:{silent.getsockname()[1]}/aa".encode().ljust(len(row))
            return np.stack([row, np.frombuffer(other, np.uint8)])

        with pytest.raises(
            PeerLostError, match=r"^127.0.0.1:\d+ cannot be reached .*: open the ephemeral ports .* Look at the log"
        ):
            MultiWorker.use_ring(SimpleNamespace(rank=0, size=2, all_gather=gather), place(0, 2), Config())


def test_a_length_beyond_all_bounds_is_no_reason_to_take_memory():
    def tell(ring):
        if ring.rank == 0:
            ring._pass_on(memoryview(struct.pack("!12sIQ", b"test", 0, 2**60)), memoryview(bytearray(24)))
            return
        with pytest.raises(RingError, match="rank 0 announces 1152921504606846976 bytes of test, which is impossible"):
            ring.all_gather(b"x", "test")

    on_every_rank(2, tell)
