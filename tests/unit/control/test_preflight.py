"""The search for peers, over real sockets."""

import socket
import threading
import time

import pytest

from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import StartupError
from tfdist.control.launcher import PortReservation
from tfdist.control.preflight import Preflight, wait_for_peers


def clusters(addresses):
    return [Cluster("worker", rank, rank, len(addresses), tuple(addresses), {"worker": list(addresses)}) for rank in range(len(addresses))]


@pytest.fixture
def addresses():
    ports = PortReservation(3)
    yield ports.addresses
    ports.close()


def test_all_find_each_other_even_if_one_is_late(addresses):
    errors = []

    def run(cluster, delay):
        time.sleep(delay)
        try:
            with Preflight(cluster, 20):
                time.sleep(0.5)  # the import of TensorFlow
        except StartupError as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(cluster, 0.5 * cluster.rank)) for cluster in clusters(addresses)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_peer_that_is_further_counts(addresses):
    """Its preflight is over, and TensorFlow's server answers in its place."""
    servers = [socket.create_server(("127.0.0.1", int(address.rpartition(":")[2])), reuse_port=True) for address in addresses[1:]]
    wait_for_peers(clusters(addresses)[0], timeout=10)
    for server in servers:
        server.close()


def test_missing_peers_are_named(addresses):
    with pytest.raises(StartupError) as error:
        wait_for_peers(clusters(addresses)[1], timeout=1)
    for rank in (0, 2):
        assert f"worker {rank} (rank {rank}, {addresses[rank]})" in str(error.value)
    assert "--startup_timeout" in str(error.value) and "within 1 s" in str(error.value)


@pytest.mark.parametrize("sharing", [False, True])
def test_a_port_in_use_is_named(sharing):
    with socket.socket() as other:
        if sharing:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(StartupError, match=f"Port {address.rpartition(':')[2]} of worker 0 .* is in use"):
            wait_for_peers(clusters([address, "127.0.0.1:1"])[0], timeout=5)


def test_alone_there_is_nothing_to_wait_for():
    wait_for_peers(Cluster(), timeout=0)


def test_an_error_in_the_body_comes_first(addresses):
    with pytest.raises(KeyError), Preflight(clusters(addresses)[0], 30):
        raise KeyError
