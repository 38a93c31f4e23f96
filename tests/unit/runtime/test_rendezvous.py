"""How plain processes find each other; the ranks are threads of this process, each with a port of its own."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ClusterError, StartupError
from tfdist.control.preflight import PortReservation
from tfdist.runtime.pulse import Pulse
from tfdist.runtime.rendezvous import exchange
from tfdist.runtime.ring import Ring


@pytest.fixture
def addresses():
    ports = PortReservation(3)
    yield ports.addresses
    ports.close()


def cluster(rank, addresses):
    return Cluster("worker", rank, rank, len(addresses), tuple(addresses), {"worker": list(addresses)})


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
        with pytest.raises(ClusterError, match="lists .*, that of the chief .*: give all workers the same cluster"):
            exchange(cluster(rank, listed), "a:0", 20)

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(run, 0, addresses[:2]), pool.submit(run, 1, addresses)]:
            future.result(timeout=30)


def test_a_pulse_that_stops_is_noticed():
    endpoints, barrier = [""] * 2, threading.Barrier(2)

    def make(rank):
        def meet(endpoint):
            endpoints[rank] = endpoint
            barrier.wait(20)
            return list(endpoints)

        return Pulse(Ring(cluster(rank, ("127.0.0.1:2000", "127.0.0.1:2001")), meet), 1.0)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(make, range(2))
    ticks = threading.Event()
    for _ in range(8):  # two seconds: longer than the patience
        assert first.is_alive(1)
        ticks.wait(0.25)
    second.close()
    for _ in range(100):
        if not first.is_alive(1):
            break
        ticks.wait(0.1)
    assert not first.is_alive(1)
    first.close()
