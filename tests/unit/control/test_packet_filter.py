"""Servers that listen on all interfaces, as TensorFlow's does, narrowed down to one address by the kernel."""

import socket
import threading
import time

import pytest

from tfdist.control.packet_filter import bind_address, own_address_only


def machines_address():
    """An IP address of this machine that is not loopback; skips where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return probe.getsockname()[0]


def everywhere():
    server = socket.socket(socket.AF_INET6)
    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    server.bind(("", 0))
    server.listen(100)
    return server


def leads(host, server):
    try:
        socket.create_connection((host, server.getsockname()[1]), timeout=0.3).close()
        return True
    except TimeoutError:
        return False


def reached(server):
    """Which of these addresses lead to a server."""
    return {host for host in ("127.0.0.1", "127.0.0.7", "::1", machines_address()) if leads(host, server)}


LOOPBACK = {"127.0.0.1", "127.0.0.7", "::1"}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_of_a_local_job_only_loopback_is_left(host):
    with own_address_only(f"{host}:1", [f"{host}:1", f"{host}:2"]), everywhere() as inside:
        for _ in range(50):  # a thread looks for servers, as soon as a busy machine lets it
            if not leads(machines_address(), inside):
                break
            time.sleep(0.05)
        assert reached(inside) == LOOPBACK
    with own_address_only(f"{host}:1", [f"{host}:1"]):
        server = everywhere()  # seen at the end at the latest
    assert reached(server) == LOOPBACK
    server.close()
    with everywhere() as other:  # which is none of its business
        assert machines_address() in reached(other)


def test_a_workers_own_address_is_left():
    own = machines_address()
    with own_address_only(f"{own}:1", [f"{own}:1", "198.51.100.1:1"]):
        server = everywhere()
    assert reached(server) == LOOPBACK | {own}
    server.close()


def test_servers_that_were_there_before_are_left_alone():
    with everywhere() as before:
        with own_address_only("127.0.0.1:1", ["127.0.0.1:1"]):
            time.sleep(0.05)
        assert machines_address() in reached(before)


def test_a_connection_through_it_carries_data():
    with own_address_only("127.0.0.1:1", ["127.0.0.1:1"]):
        server = everywhere()
    received = []
    thread = threading.Thread(target=lambda: received.append(server.accept()[0].recv(1 << 20, socket.MSG_WAITALL)))
    thread.start()
    with socket.create_connection(("127.0.0.1", server.getsockname()[1])) as client:
        client.sendall(bytes(1 << 20))
    thread.join(20)
    assert len(received[0]) == 1 << 20
    server.close()


def test_only_where_all_are_addresses_of_one_kind():
    own = machines_address()
    assert (
        bind_address("127.0.0.1:1", ["127.0.0.1:1", "localhost:2", "127.0.0.2:3"]) == "127.0.0.1"
        and bind_address(f"{own}:1", ["198.51.100.1:1"]) == own
    )
    for address, peers in [
        ("worker-0:1", []),
        ("127.0.0.1:1", [f"{own}:1"]),
        (f"{own}:1", ["127.0.0.1:1"]),
        ("127.0.0.1:1", ["[::1]:1"]),
        ("198.51.100.1:1", []),
        (f"{own}:1", ["worker-1:1"]),
        ("", []),
    ]:
        assert bind_address(address, peers) == "", (address, peers)
