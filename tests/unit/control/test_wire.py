"""Connections between processes of a job, and what strangers try at the socket that takes them.

All on loopback, in threads.
"""

import contextlib
import random
import resource
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfdist.control import reception, wire
from tfdist.control.reception import Reception
from tfdist.control.token import Secret
from tfdist.control.wire import OtherJobError, SharedKey

SECRET, OTHER = Secret(b"the secret of this job"), Secret(b"the secret of another")


class Host:
    """A reception in a thread, for ranks from 0 to 3. Closes what arrives."""

    def __init__(self, secret=SECRET, purpose="test", rank=0):
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.reception = Reception(self.listener, SharedKey.of(secret, purpose), rank, lambda other: 0 <= other <= 3)
        self.arrived, self.most, self._stop = [], 0, threading.Event()
        self.thread = threading.Thread(target=self._serve)

    def _serve(self):
        while not self._stop.is_set():
            for arrival in self.reception.poll(0.05):
                self.arrived.append((arrival.rank, arrival.message))
                arrival.connection.close()
            self.most = max(self.most, len(self.reception._strangers))

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self.thread.join()
        self.reception.close()
        self.listener.close()

    def raw(self, data=b""):
        connection = socket.create_connection(wire.address_of(self.address), timeout=10)
        connection.sendall(data)
        return connection

    def honest(self, rank=1, message=b"hello", secret=SECRET, seconds=10.0, purpose="test", expected=0):
        with wire.connect(
            self.address, SharedKey.of(secret, purpose), rank, expected, time.monotonic() + seconds, message
        ):
            return True

    def is_well(self):
        """Whether somebody of the job still gets in."""
        known = len(self.arrived)
        self.honest(2, b"still here")
        return until(lambda: (2, b"still here") in self.arrived[known:]) and self.thread.is_alive()


@contextlib.contextmanager
def black_hole():
    """The address of a listener whose queue is full: like a firewall, Linux then drops what arrives."""
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        with contextlib.suppress(TimeoutError):
            while True:
                opened.enter_context(socket.create_connection(listener.getsockname(), timeout=0.2))
        yield listener.getsockname()


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)
    return True


def is_closed(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_an_address_that_drops_packets_leaves_time_for_the_other_addresses_of_a_name(monkeypatch):
    with Host() as host, black_hole() as first:
        both = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in (first, wire.address_of(host.address))
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
        assert host.honest(seconds=2.0)


def test_both_sides_prove_themselves_and_a_message_comes_with_it():
    with Host() as host:
        assert host.honest(3, b"x" * 100_000)
        until(lambda: host.arrived == [(3, b"x" * 100_000)])


@pytest.mark.parametrize(
    ("theirs", "ours", "said", "noted"),
    [
        (OTHER, SECRET, "has another job token", "has another job token"),
        (Secret(), SECRET, "has a job token, but this worker has none", "has none, but this worker has a job token"),
        (SECRET, Secret(), "has none, but this worker has a job token", "has a job token, but this worker has none"),
    ],
)
def test_who_has_not_the_token_is_told_and_noted(theirs, ours, said, noted, capsys):
    with Host(ours) as host:
        with pytest.raises(OtherJobError, match=said):
            host.honest(secret=theirs)
        until(
            lambda: any(
                noted in note and "rank 1" in note and "TFDIST_JOB_TOKEN" in note for note in host.reception.notes
            )
        )
        assert not host.arrived and (not ours or host.honest(secret=ours))
    assert capsys.readouterr().err.count(noted) == 1


@pytest.mark.parametrize("wrong", [{"purpose": "another"}, {"expected": 3}])
def test_who_means_another_meeting_or_rank_notices(wrong):
    with Host() as host:
        with pytest.raises(OtherJobError):
            host.honest(**wrong)
        assert host.is_well() and len(host.arrived) == 1


def test_a_rank_that_cannot_be_is_turned_away():
    with Host() as host:
        for rank in (-1, 4, 2**31 - 1):
            with pytest.raises(OSError):
                host.honest(rank)
        assert host.is_well() and len(host.arrived) == 1


def test_a_recorded_conversation_opens_nothing():
    """A relay between two of the job writes down all that is said; later it says the same again."""
    with Host() as host:
        relay, said = socket.create_server(("127.0.0.1", 0)), []

        def pass_on():
            near, far = relay.accept()[0], host.raw()
            with near, far:
                near.settimeout(10)
                for size, source, target in ((45, near, far), (77, far, near), (36 + 5, near, far), (1, far, near)):
                    data = source.recv(size, socket.MSG_WAITALL)
                    said.append(data)
                    target.sendall(data)

        thread = threading.Thread(target=pass_on)
        thread.start()
        with wire.connect(
            f"127.0.0.1:{relay.getsockname()[1]}", SharedKey.of(SECRET, "test"), 1, 0, time.monotonic() + 10, b"hello"
        ):
            pass
        thread.join()
        relay.close()
        until(lambda: host.arrived == [(1, b"hello")])
        for split in (True, False):
            with host.raw(said[0] if split else said[0] + said[2]) as replay:
                with contextlib.suppress(ConnectionError):
                    replay.recv(77)
                    replay.sendall(said[2] if split else b"")
                assert is_closed(replay)
        assert host.is_well() and len(host.arrived) == 2


def test_an_echo_of_ones_own_words_proves_nothing():
    echo = socket.create_server(("127.0.0.1", 0))

    def answer():
        connection, _ = echo.accept()
        with connection:
            hello = connection.recv(45, socket.MSG_WAITALL)
            connection.sendall(hello + bytes(32))

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(OtherJobError):
        wire.connect(f"127.0.0.1:{echo.getsockname()[1]}", SharedKey.of(SECRET, "test"), 0, 0, time.monotonic() + 10)
    thread.join()
    echo.close()


def test_garbage_of_all_kinds_harms_nobody():
    rng = random.Random(7)
    hello = SharedKey.of(SECRET, "test").hello(1)
    pieces = [
        b"",
        b"\n",
        b'{"rank": [], "peers": 1}\n' * 3,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100_000,
        hello[:20],
        hello + b"\xff" * 36,
        hello * 2,
        hello + bytes(32) + struct.pack("!I", 2**32 - 1),
        b"\x80\x04\x95" + bytes(50),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        *(rng.randbytes(rng.randrange(200)) for _ in range(300)),
        *(
            bytes(byte ^ (rng.random() < 0.02) * rng.randrange(256) for byte in hello + rng.randbytes(40))
            for _ in range(300)
        ),
    ]
    with Host() as host:
        for piece in pieces:
            with contextlib.suppress(OSError):  # it has hung up before all was said
                host.raw(piece).close()
        assert host.is_well() and len(host.arrived) == 1
        assert len(host.reception.notes) <= 3


def test_somebody_of_the_job_may_not_send_without_end():
    with Host() as host, host.raw() as member:
        key = SharedKey.of(SECRET, "test")
        mine = key.hello(1)
        member.sendall(mine)
        hello = member.recv(77, socket.MSG_WAITALL)[:45]
        member.sendall(key.proof_of_connecting(mine, hello) + struct.pack("!I", 2**32 - 1))
        member.settimeout(2)  # it is not waited for
        assert is_closed(member) and host.is_well()


def test_the_silent_and_the_slow_hold_up_nobody_and_are_dropped(monkeypatch):
    def say_nothing(host):
        return [host.raw(data) for data in [b"", b"tfdist", SharedKey.of(SECRET, "test").hello(1)] * 20]

    monkeypatch.setattr(reception, "_PATIENCE", 600.0)
    with Host() as host:
        silent = say_nothing(host)
        assert host.is_well() and len(host.reception._strangers) >= len(silent)  # none of whom was given up
        for connection in silent:
            connection.close()
        monkeypatch.setattr(reception, "_PATIENCE", 0.5)
        silent, drip = say_nothing(host), host.raw()
        for _ in range(200):  # a byte now and then does not buy time
            time.sleep(0.1)
            try:
                drip.sendall(b"t")
            except OSError:
                break
        else:
            pytest.fail("a slow stranger was never dropped")
        until(lambda: not host.reception._strangers)
        for connection in (*silent, drip):
            connection.close()


@pytest.mark.slow
def test_a_flood_meets_a_bound_and_lets_the_job_through():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    stop = threading.Event()
    try:
        with Host() as host, ThreadPoolExecutor(4) as pool:

            def flood():
                held = []
                while not stop.is_set():
                    with contextlib.suppress(OSError):
                        held.append(host.raw(random.choice([b"", b"tfdist", b"x" * 1000])))
                    if len(held) > 500:
                        held.pop(0).close()
                for connection in held:
                    connection.close()

            floods = [pool.submit(flood) for _ in range(3)]
            until(lambda: host.most == reception._MOST_STRANGERS)
            try:
                deadline = time.monotonic() + 30
                for rank in (1, 2, 3):
                    while True:  # as the workers do: try again until the time is over
                        try:
                            assert host.honest(rank, seconds=5)
                            break
                        except OSError:
                            assert time.monotonic() < deadline
            finally:
                stop.set()
            [future.result() for future in floods]
            assert host.most <= reception._MOST_STRANGERS and {rank for rank, _ in host.arrived} == {1, 2, 3}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xff\xff\xff",
        struct.pack("!I", 5) + b"[[[[[",
        struct.pack("!I", 4) + b"null",
        struct.pack("!I", 200_000) + b"[" * 200_000,
        struct.pack("!I", 9) + b"{",
    ],
)
def test_messages_that_are_none_are_refused(data):
    near, far = socket.socketpair()
    with near, far:
        thread = threading.Thread(target=lambda: (near.sendall(data), near.shutdown(socket.SHUT_WR)))
        thread.start()
        with pytest.raises((OSError, ValueError)):
            wire.read_message(far, time.monotonic() + 5)
        thread.join()


def test_a_message_that_trickles_in_is_given_up_at_its_deadline():
    near, far = socket.socketpair()
    stop = threading.Event()

    def trickle():
        near.sendall(struct.pack("!I", 1000))
        while not stop.wait(0.05):
            near.sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    with pytest.raises(TimeoutError):  # all 1000 bytes are there after 50 s
        wire.read_message(far, time.monotonic() + 0.5)
    stop.set()
    thread.join()
    near.close()
    far.close()
