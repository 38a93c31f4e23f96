"""What a worker learns of its neighbours over the ring of connections; the ranks are threads of this process."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError
from tfdist.control.preflight import PortReservation
from tfdist.runtime.ring.control_ring import ControlRing
from tfdist.runtime.ring.ring_error import user_error


@pytest.fixture
def rings():
    """Of three workers."""
    ports = PortReservation(3)
    config = Config().replace(startup_timeout=60.0, heartbeat_timeout=60.0)
    clusters = [Cluster.of_workers(ports.addresses, rank) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda cluster: ControlRing(config, cluster), clusters))
    yield found
    for ring in found:
        ring.close()
        ring._ring.close()
    ports.close()


def soon_lost(ring):
    """What is known a moment later, if it is not known at once: packets take their time."""
    for _ in range(3000):
        if ring.lost() is not None:
            break
        time.sleep(0.01)
    return ring.lost()


def test_neighbours_that_are_there_are_not_lost_whatever_they_have_sent(rings):
    assert [ring.lost() for ring in rings] == [None] * 3
    rings[0]._ring.right.send(b"the beginning of something")
    assert [ring.lost() for ring in rings] == [None] * 3


def test_a_neighbour_that_closed_its_connection_is_lost_even_if_it_has_sent_something_before(rings):
    rings[0]._ring.right.send(b"unread")
    rings[0]._ring.close()
    for ring in rings[1:]:
        assert "lost contact with rank 0 (it closed the connection)" in soon_lost(ring)


def test_a_neighbour_that_said_goodbye_has_come_to_its_end(rings):
    rings[0].say_goodbye()
    sentence = soon_lost(rings[1])
    error = user_error(sentence)
    assert isinstance(error, ConfigError) and "Rank 0 has reached the end of its script" in str(error)
    assert rings[2].lost() is None  # to which it says nothing, and has not closed the connection
    rings[0]._ring.close()
    assert rings[1].lost() == sentence


def test_a_neighbour_without_a_pulse_is_lost(rings, monkeypatch):
    monkeypatch.setattr(rings[1], "is_alive", lambda rank: rank != 2)
    assert "rank 2 no longer answers" in rings[1].lost()


def test_what_is_gathered_is_in_rank_order(rings):
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda ring: ring.gather_for_user(bytes([ring._ring.rank]), "test"), rings))
    assert [[bytes(each) for each in of_rank] for of_rank in found] == [[b"\0", b"\1", b"\2"]] * 3
