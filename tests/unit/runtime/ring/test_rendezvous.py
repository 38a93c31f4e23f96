"""How plain processes find each other; the ranks are threads of this process, each with a port of its own."""

import contextlib
import json
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tfdist.control import wire
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ClusterError, StartupError
from tfdist.control.preflight import PortReservation
from tfdist.control.token import Secret
from tfdist.runtime.ring import heartbeat
from tfdist.runtime.ring.heartbeat import Heartbeat
from tfdist.runtime.ring.rendezvous import exchange
from tfdist.runtime.ring.ring import Ring
from tfdist.runtime.ring.ring_connections import Patience


@pytest.fixture
def addresses():
    ports = PortReservation(3)
    yield ports.addresses
    ports.close()


def cluster(rank, addresses, secret=None):
    return Cluster(
        "worker", rank, rank, len(addresses), tuple(addresses), {"worker": list(addresses)}, secret=secret or Secret()
    )


def test_all_learn_all_endpoints_whatever_knocks(addresses):
    def chief():
        return exchange(cluster(0, addresses), "a:0", 20)

    def worker(rank):
        return exchange(cluster(rank, addresses), f"a:{rank}", 20)

    with ThreadPoolExecutor(3) as pool:
        early = pool.submit(worker, 2)  # before the chief listens
        first = pool.submit(chief)
        host, _, port = addresses[0].rpartition(":")
        for _ in range(200):
            try:
                socket.create_connection((host, int(port)), timeout=5).close()  # as the preflight does
                break
            except ConnectionRefusedError:
                threading.Event().wait(0.05)
        results = [first, pool.submit(worker, 1), early]
        assert [result.result(timeout=30) for result in results] == [["a:0", "a:1", "a:2"]] * 3


def test_who_is_missing_is_named(addresses):
    with pytest.raises(StartupError, match=r"worker 1 \(rank 1, .*worker 2 \(rank 2, .*did not appear within 0.3 s"):
        exchange(cluster(0, addresses), "a:0", 0.3)
    with pytest.raises(StartupError, match=r"The chief, worker 0 \(rank 0, .*did not answer within 0.3 s"):
        exchange(cluster(1, addresses), "a:1", 0.3)


def test_different_clusters_are_refused_on_both_sides(addresses):
    def run(rank, listed):
        with pytest.raises(
            ClusterError, match="lists .*, but the one of the chief lists .*: give all workers the same cluster"
        ):
            exchange(cluster(rank, listed), "a:0", 20)

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(run, 0, addresses[:2]), pool.submit(run, 1, addresses)]:
            future.result(timeout=30)


SECRET = Secret(b"the secret of this job")


@contextlib.contextmanager
def strangers(address, speak):
    """Somebody who does this at an address again and again."""
    stop = threading.Event()

    def go_on():
        while not stop.is_set():
            with contextlib.suppress(OSError):
                speak(socket.create_connection(wire.address_of(address), timeout=5))
            stop.wait(0.001)

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(go_on) for _ in range(2)]
        try:
            yield
        finally:
            stop.set()
        [future.result(timeout=30) for future in futures]


def old_hello(rank, addresses, endpoint="127.0.0.1:9"):
    return json.dumps({"rank": rank, "peers": list(addresses), "endpoint": endpoint}).encode() + b"\n"


def test_strangers_neither_join_nor_hold_up_nor_end_a_job(addresses):
    """Silent connections, garbage, another token, and the words of a worker: all while the workers meet."""
    held, turn = [], iter(range(10**9))

    def speak(connection):
        held.append(connection)
        if len(held) > 300:
            held.pop(0).close()
        words = [
            b"",
            b"\xff" * 5000,
            old_hello([], addresses),
            old_hello(1, addresses),
            old_hello(2, addresses),
            b'{"rank": 1e999}\n',
            wire.SharedKey.of(Secret(), "rendezvous").hello(1),
            wire.SharedKey.of(SECRET, "ring").hello(2) + bytes(36),
        ]
        connection.sendall(words[next(turn) % len(words)])

    def later(rank):
        threading.Event().wait(0.5 * rank)
        return exchange(cluster(rank, addresses, SECRET), f"a:{rank}", 20)

    with ThreadPoolExecutor(3) as pool, strangers(addresses[0], speak):
        assert list(pool.map(later, range(3))) == [["a:0", "a:1", "a:2"]] * 3
    for connection in held:
        connection.close()


@pytest.mark.parametrize(
    ("chief", "worker", "said"),
    [
        (SECRET, Secret(), "has a job token, but this worker has none"),
        (Secret(), SECRET, "has none, but this worker has a job token"),
        (SECRET, Secret(b"another"), "has another job token, or belongs to another job"),
    ],
)
def test_who_has_no_token_or_another_is_told_at_once_on_both_sides(chief, worker, said, addresses, capsys):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(exchange, cluster(0, addresses[:2], chief), "a:0", 1.5)
        with pytest.raises(ClusterError, match=f"The chief, worker 0 .* {said}: give all workers the same token"):
            exchange(cluster(1, addresses[:2], worker), "a:1", 20)
        with pytest.raises(StartupError) as error:
            waiting.result(timeout=30)
        assert "Rejected: a process at 127.0.0.1 that claims to be rank 1 has" in str(error.value)


def test_two_processes_of_one_rank_are_told(addresses):
    with ThreadPoolExecutor(3) as pool:
        chief = pool.submit(exchange, cluster(0, addresses, SECRET), "a:0", 20)
        first = pool.submit(exchange, cluster(1, addresses, SECRET), "a:1", 20)
        threading.Event().wait(0.5)
        second = pool.submit(exchange, cluster(1, addresses, SECRET), "a:1", 20)
        with pytest.raises(
            ClusterError, match="Another process claims to be rank 1, too: give each worker its own task.index"
        ):
            first.result(timeout=30)
        assert (
            exchange(cluster(2, addresses, SECRET), "a:2", 20) == chief.result(timeout=30) == second.result(timeout=30)
        )


def test_a_stranger_at_a_rings_port_is_no_neighbour():
    """It connects before the true one, with all that it may know: the rank, but not the table of endpoints, nor the
    token.
    """
    endpoints, barrier, met = [""] * 2, threading.Barrier(2), threading.Event()

    def meet(rank, endpoint):
        endpoints[rank] = endpoint
        barrier.wait(20)
        if rank == 1:
            assert met.wait(20)
        return list(endpoints)

    def make(rank):
        ring = Ring(
            cluster(rank, ("127.0.0.1:2000", "127.0.0.1:2001"), SECRET),
            lambda endpoint: meet(rank, endpoint),
            Patience(10),
        )
        found = ring.all_gather(f"rank {rank}".encode(), "test")
        ring.close()
        return [bytes(each) for each in found]

    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(make, rank) for rank in range(2)]
        while not all(endpoints):
            threading.Event().wait(0.01)
        held = [socket.create_connection(wire.address_of(endpoints[0]), timeout=5) for _ in range(20)]
        for number, connection in enumerate(held):
            connection.sendall(
                [
                    struct.pack("!I", 1),
                    b"",
                    wire.SharedKey.of(Secret(), "ring", *endpoints).hello(1) + bytes(36),
                    wire.SharedKey.of(SECRET, "ring").hello(1) + bytes(36),
                ][number % 4]
            )
        met.set()
        assert [result.result(timeout=30) for result in results] == [[b"rank 0", b"rank 1"]] * 2
    for connection in held:
        connection.close()


@pytest.mark.slow
def test_a_pulse_that_stops_is_noticed():
    endpoints, barrier = [""] * 2, threading.Barrier(2)

    def make(rank):
        def meet(endpoint):
            endpoints[rank] = endpoint
            barrier.wait(20)
            return list(endpoints)

        return Heartbeat(Ring(cluster(rank, ("127.0.0.1:2000", "127.0.0.1:2001")), meet), 1.0)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(make, range(2))
    ticks = threading.Event()
    for _ in range(6):  # a second and a half: longer than the patience
        assert first.is_alive(1)
        ticks.wait(0.25)
    second.close()
    for _ in range(100):
        if not first.is_alive(1):
            break
        ticks.wait(0.1)
    assert not first.is_alive(1)
    first.close()


def test_who_stood_still_itself_takes_nobody_for_dead(monkeypatch):
    now, beat = [0.0], Heartbeat._beat
    monkeypatch.setattr(Heartbeat, "_beat", lambda self: None)  # the test beats in place of the thread
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ours, theirs = socket.socketpair()  # the other is silent
    with ours, theirs:
        made = Heartbeat(SimpleNamespace(rank=0, size=2, rights={1: ours}, lefts={}), 8.0)
        alive = []
        for now[0] in (100.0, 102.0, 104.0, 106.0, 108.0):
            before, rounds = made.is_alive(1), iter([False, True])
            made._ended = SimpleNamespace(wait=lambda _, rounds=rounds: next(rounds))
            beat(made)
            alive.append((before, made.is_alive(1)))
    assert alive == [(True, True)] * 4 + [(False, False)]  # 8 s of silence since it woke up
