"""The search for peers, over real sockets."""

import contextlib
import errno
import socket
import threading
import time

import pytest

from tfdist.control import preflight
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import StartupError
from tfdist.control.preflight import Preflight, bind_everywhere, wait_for_peers
from tfdist.launcher.local_job import PortReservation


def clusters(addresses):
    return [
        Cluster("worker", rank, rank, len(addresses), tuple(addresses), {"worker": list(addresses)})
        for rank in range(len(addresses))
    ]


def port_of(address):
    return int(address.rpartition(":")[2])


@pytest.fixture
def addresses():
    ports = PortReservation(3)
    yield ports.addresses
    ports.close()


@pytest.mark.parametrize("reserved", [True, False])
def test_all_find_each_other_and_hand_the_port_over(addresses, reserved):
    """Also if one is late, and if no launcher holds the ports."""
    if not reserved:
        ports = PortReservation(3)
        addresses = ports.addresses
        ports.close()
    errors, all_through = [], threading.Barrier(3)

    def run(cluster):
        time.sleep(0.3 * cluster.rank)
        try:
            with Preflight(cluster, 30):
                time.sleep(0.3)  # the import of TensorFlow
            # As gRPC does it, whose server must share the port only if a launcher holds it.
            with socket.create_server(("", port_of(cluster.address)), reuse_port=reserved) as server:
                server.listen()
                all_through.wait(timeout=30)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(cluster,)) for cluster in clusters(addresses)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_peer_that_is_further_counts(addresses, monkeypatch):
    """Its preflight is over, and TensorFlow's server answers in its place."""
    monkeypatch.setattr(preflight, "_LINGER_SECONDS", 0.3)
    with contextlib.ExitStack() as servers:
        for address in addresses[1:]:
            servers.enter_context(socket.create_server(("127.0.0.1", port_of(address)), reuse_port=True))
        wait_for_peers(clusters(addresses)[0], timeout=10)


def test_missing_peers_are_named(addresses, monkeypatch):
    monkeypatch.setattr(preflight, "_REPORT_SECONDS", 0.2)
    reports = []
    with pytest.raises(StartupError) as error:
        wait_for_peers(clusters(addresses)[1], timeout=1, report=reports.append)
    for rank in (0, 2):
        assert f"worker {rank} (rank {rank}, {addresses[rank]})" in str(error.value)
        assert f"worker {rank} (rank {rank}, {addresses[rank]})" in reports[0]
    assert "worker 1" not in str(error.value)
    assert "--startup_timeout" in str(error.value) and "within 1 s" in str(error.value)


@pytest.mark.parametrize("unknown", ["no-such-host.invalid:2222", "a..b:2222"])
def test_a_name_that_does_not_resolve_is_not_there_yet(addresses, unknown):
    with pytest.raises(StartupError, match=f"worker 1 .*{unknown}.* did not appear"):
        wait_for_peers(clusters([addresses[0], unknown])[0], timeout=0.5)


@pytest.mark.parametrize("sharing", [False, True])
def test_a_port_in_use_is_named(sharing):
    with socket.socket() as other:
        if sharing:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(StartupError, match=f"Port {port_of(address)} of worker 0 .* is in use"):
            wait_for_peers(clusters([address, "127.0.0.1:1"])[0], timeout=5)


def test_a_port_that_is_bound_without_listening_is_in_use_too():
    with socket.socket() as other:
        other.bind(("", 0))
        with pytest.raises(StartupError, match="is in use"):
            wait_for_peers(clusters([f"127.0.0.1:{other.getsockname()[1]}", "127.0.0.1:1"])[0], timeout=5)


def test_a_server_at_an_own_address_that_is_not_the_first_is_found():
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.2", 0))
        other.listen()
        with pytest.raises(StartupError, match="is in use"):
            wait_for_peers(clusters([f"127.0.0.2:{other.getsockname()[1]}", "127.0.0.1:1"])[0], timeout=5)


def test_a_server_behind_a_name_that_is_not_ours_is_found():
    """The name in TF_CONFIG may be that of a service; the port is this machine's all the same."""
    with (
        socket.create_server(("127.0.0.1", 0), reuse_port=True) as other,
        pytest.raises(StartupError, match="is in use"),
    ):
        wait_for_peers(clusters([f"no-such-host.invalid:{other.getsockname()[1]}", "127.0.0.1:1"])[0], timeout=5)


def test_connections_of_an_earlier_run_do_not_keep_the_port():
    """The side that closes first keeps it in TIME_WAIT for a minute."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        server.accept()[0].close()
        client.recv(1)
    with pytest.raises(StartupError, match="worker 1 .* did not appear"):
        wait_for_peers(clusters([address, "127.0.0.1:1"])[0], timeout=0.1)


def test_a_knock_does_not_answer_itself():
    """Linux takes even local ports for outgoing connections; sooner or later the very one that is probed at."""
    with bind_everywhere(0) as bound:
        port = bound.getsockname()[1] // 2 * 2
    assert not any(preflight.answers(f"127.0.0.1:{port}") for _ in range(20_000))


def test_an_answer_that_is_reset_at_once_is_one(monkeypatch):
    """As `wait_for_peers` does it: on a busy machine the end may be there before the connection is looked at."""

    class Reset(socket.socket):
        def getpeername(self):
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    def reset(*_, **__):
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    for connect in (reset, lambda *_, **__: Reset()):
        monkeypatch.setattr(socket, "create_connection", connect)
        assert preflight.answers("127.0.0.1:1")
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: (_ for _ in ()).throw(ConnectionRefusedError()))
    assert not preflight.answers("127.0.0.1:1")


def test_more_knocks_than_the_queue_holds(addresses, monkeypatch):
    """Nobody would answer the late ones in a large cluster if the queue were not emptied."""
    bind = preflight.bind_everywhere

    class Socket(socket.socket):  # instances of socket.socket take no attributes
        pass

    def bind_short(port):
        plain = bind(port)
        short = Socket(plain.family, plain.type, fileno=plain.detach())
        short.listen = lambda _: socket.socket.listen(short, 2)
        return short

    monkeypatch.setattr(preflight, "bind_everywhere", bind_short)
    stop = threading.Event()
    thread = threading.Thread(target=wait_for_peers, args=(clusters(addresses)[0], 120), kwargs={"given_up": stop})
    thread.start()
    deadline = time.monotonic() + 60
    while not preflight.answers(addresses[0]) and time.monotonic() < deadline:
        time.sleep(0.02)
    answered = 0
    with contextlib.ExitStack() as probes:
        for _ in range(7):
            with contextlib.suppress(OSError):
                with contextlib.suppress(ConnectionResetError):  # answered, and the end came before we looked
                    probes.enter_context(
                        socket.create_connection(("127.0.0.1", port_of(addresses[0])), timeout=40)
                    )  # a probe that was dropped comes again after 1, 3, 7, 15 and 31 s
                answered += 1
    stop.set()
    thread.join()
    assert answered == 7


def test_the_port_is_bound_for_ipv6_too():
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with bind_everywhere(0) as bound, socket.socket(socket.AF_INET6) as other, pytest.raises(OSError):
        other.bind(("::1", bound.getsockname()[1]))


def test_alone_there_is_nothing_to_wait_for():
    wait_for_peers(Cluster(), timeout=0)
    wait_for_peers(Cluster("evaluator", 0, -1, 2, ("a:1", "b:2"), {"worker": ["a:1", "b:2"]}), timeout=0)


def test_an_error_in_the_body_comes_first_and_ends_the_search(addresses):
    with pytest.raises(KeyError), Preflight(clusters(addresses)[0], 30):
        raise KeyError
    deadline = time.monotonic() + 10
    while any(thread.name == "tfdist-preflight" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(thread.name == "tfdist-preflight" for thread in threading.enumerate())


def test_the_port_answers_until_a_late_peer_has_probed_it(addresses):
    """Whose probes come seldom on a loaded machine: nobody may listen there later."""
    quick, slow = clusters(addresses[:2])
    with bind_everywhere(
        port_of(slow.address)
    ) as listener:  # the slow one listens, and looks for the other a second later
        listener.listen()
        searching = threading.Thread(target=wait_for_peers, args=(quick, 30))
        searching.start()
        time.sleep(1.0)
        while not preflight.answers(quick.address):  # it may not have had a core yet
            assert searching.is_alive(), "it has left, though it was not probed"
        probed = time.monotonic()
        searching.join()
    assert time.monotonic() - probed < 1.5  # it does not wait longer than for that
