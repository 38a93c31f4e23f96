"""The ways of Ring.all_reduce among three ranks and more: the same bits, fewer waits. The ranks are threads."""

from __future__ import annotations

import math
import sys
import threading
import time

import numpy as np
import pytest

from tests.marks import slow_but
from tests.unit.runtime.ring.test_ring import data, on_every_rank
from tfdist.runtime.all_reduce_choice import Link
from tfdist.runtime.ring.ring_connections import Patience
from tfdist.runtime.ring.ring_error import RingError


@pytest.fixture
def doubling(monkeypatch):
    """A function that says up to how many bytes sums are made by doubling."""

    def up_to(size):
        monkeypatch.setattr(Link, "doubled_bytes", size)

    return up_to


def sums(size, count, share=False, spared=False, turns=4):
    """[the sums of every rank] of a few arrays."""

    def reduce(ring):
        assert ring.all_read == share
        found, pool = [], []

        def spare(length):
            for array in pool:
                if sys.getrefcount(array) == 3:
                    return array
            pool.append(ring.empty(length))
            return pool[-1]

        for turn in range(turns):
            array = spare(count)
            array[:] = data(ring.rank + 10 * turn, count)
            if turn % size == ring.rank:  # so that each is late once
                time.sleep(0.01)
            total = ring.all_reduce(array, 3, turn, spare=spare if spared else None)
            found.append(total.copy())
            if not spared:
                array[:] = np.nan  # it is its owner's again
            del array, total
        assert len(pool) <= 2, "this array, and one that may still be read"
        return found

    return on_every_rank(size, reduce, share=share)


@pytest.mark.parametrize("size", slow_but([3, 4, 5, 8], 3, 4))
@pytest.mark.parametrize("count", [0, 1, 7, 1001, 100_003])
def test_all_ways_give_the_same_bits(size, count, doubling):
    doubling(0)
    ring = sums(size, count)
    for other in ring[1:]:
        np.testing.assert_array_equal(other, ring[0])
    for share, spared in ((True, False), (True, True)):
        np.testing.assert_array_equal(sums(size, count, share, spared), ring)
    doubling(1 << 30)
    np.testing.assert_array_equal(sums(size, count), ring)
    whole = sum(data(rank, count).astype("float64") for rank in range(size))
    np.testing.assert_allclose(ring[0][0], whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [3, 4, 8])
def test_waits(size, doubling):
    def waits(share, way):
        def reduce(ring):
            passed, pass_on = [], ring._pass_on
            ring._pass_on = lambda outgoing, incoming, *others, **named: (
                passed.append(bool(len(incoming))),
                pass_on(outgoing, incoming, *others, **named),
            )
            ring.all_reduce(ring.empty(1000), spare=ring.empty)
            return sum(passed)

        doubling(way)
        (found,) = set(on_every_rank(size, reduce, share=share))
        return found

    exchanges = math.ceil(math.log2(size))
    assert waits(False, 0) == 2 * (size - 1) + 1
    assert waits(False, 1 << 20) == 2 * exchanges  # of headers, and right after them of what they say
    assert waits(True, 0) == 3 * exchanges


def test_an_array_that_is_not_shared_is_sent(doubling):
    doubling(0)
    wanted = sums(3, 1001)

    def reduce(ring):
        found = []
        for turn in range(4):
            array = np.empty(1001, np.float32) if ring.rank == 1 else ring.empty(1001)
            array[:] = data(ring.rank + 10 * turn, 1001)
            found.append(ring.all_reduce(array).copy())
        return found

    np.testing.assert_array_equal(on_every_rank(3, reduce, share=True), wanted)


@pytest.mark.parametrize("size", [3, 5])
def test_whole_and_halved_sums_and_rows_take_turns(size):
    """With arrays of one pool: of each, some ways have one reader, others all."""

    def reduce(ring):
        arrays, found = [ring.empty(size * 64) for _ in range(2)], []
        for turn in range(8):
            array = arrays[turn % 2]
            array[:] = data(ring.rank, size * 64).astype("float16")
            if turn % 3 == 2:
                ring.gather(array, turn)
            else:
                ring.all_reduce(array, turn, halved=turn % 3 == 0)
            found.append(array.copy())
        return found

    results = on_every_rank(size, reduce, share=True)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
    rows = np.concatenate([data(rank, size * 64).astype("float16")[64 * rank : 64 * rank + 64] for rank in range(size)])
    np.testing.assert_array_equal(results[0][2], rows.astype("float32"))


@pytest.mark.parametrize("share", [False, True])
def test_arrays_of_other_lengths_are_noticed_by_all(share, doubling):
    doubling(1 << 20)

    def reduce(ring):
        with pytest.raises(RingError, match="same program"):
            ring.all_reduce(ring.empty(5 if ring.rank == 2 else 4))

    on_every_rank(4, reduce, share=share)


@pytest.mark.parametrize("size", [3, 4, 5, 8])
def test_a_gather_that_is_refused_is_refused_by_all_and_leaves_nothing(size):
    def gather(ring):
        with pytest.raises(RingError, match="have different batches"):
            ring.all_gather(bytes(100_000 + ring.rank), "batches", int(ring.rank == 2))
        return ring.all_gather(bytes([ring.rank]), "next")

    for result in on_every_rank(size, gather):
        assert result == [bytes([rank]) for rank in range(size)]


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("gone", range(1, 4))
def test_a_rank_that_leaves_ends_the_others(share, gone):
    def reduce(ring):
        if ring.rank == gone:
            return ""
        with pytest.raises(RingError, match="lost contact with rank") as error:
            ring.all_reduce(ring.empty(1000))
        ring.close()  # as a process does that ends
        return str(error.value)

    said = on_every_rank(4, reduce, share=share)
    assert any(f"rank {gone}" in sentence for sentence in said)


def test_a_stopped_rank_two_places_away_is_named():
    waiting = threading.Event()

    def reduce(ring):
        if ring.rank == 1:
            waiting.wait(30)
            return
        ring.patience = Patience(20.0, lambda rank: rank != 1, 0.1)
        if ring.rank == 3:  # hears of it at a distance of two alone
            ring.distances = [2]
            try:
                with pytest.raises(RingError, match="rank 1 no longer answers"):
                    ring.all_gather(b"", "test")
            finally:
                waiting.set()

    on_every_rank(4, reduce)


@pytest.mark.parametrize("ranks", [3, 4, 8, 32])
@pytest.mark.parametrize("latency, per_byte", [(50e-6, 1 / 1.2e9), (5e-6, 1 / 4e9), (500e-6, 1 / 1e8), (1e-4, 0.0)])
def test_doubling_is_chosen_where_it_is_quicker(ranks, latency, per_byte):
    def ring(size):
        return (2 * ranks - 1) * latency + 2 * (ranks - 1) / ranks * size * per_byte

    def doubled(size):
        return math.ceil(math.log2(ranks)) * latency + (ranks - 1) * size * per_byte + ranks * (ranks - 1) * 1e-6

    limit = Link(latency, per_byte, ranks).doubled_bytes
    if limit:
        assert doubled(limit * 0.99) <= ring(limit * 0.99)
    if per_byte:
        assert doubled(limit * 1.01 + 1) >= ring(limit * 1.01 + 1)


def test_what_is_measured_is_the_same_on_all_ranks():
    links = on_every_rank(3, lambda ring: ring.link)
    assert len(set(links)) == 1 and 0 < links[0].latency_s < 1 and 0 <= links[0].seconds_per_byte < 1e-5
    assert on_every_rank(3, lambda ring: ring.link, share=True) == [None] * 3
    assert on_every_rank(2, lambda ring: ring.link) == [None] * 2
