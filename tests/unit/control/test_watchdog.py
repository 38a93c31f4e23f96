"""Sections that take too long, and who is to blame."""

import os
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from tfdist.config import Config
from tfdist.control import exit_codes
from tfdist.control.beacons import Beacons
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import (
    ConfigError,
    DataError,
    DivergedError,
    ExitCode,
    MemoryShortError,
    PeerFailedError,
    PeerLostError,
)
from tfdist.control.lease_owner import end_worker
from tfdist.control.token import Secret
from tfdist.control.watchdog import Watchdog, all_stacks, main_thread_at
from tfdist.run.health import HealthMonitor


def until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def test_a_section_that_takes_too_long_is_told_once():
    clock, told = [0.0], []
    dog = Watchdog(
        {"step": 5.0, "save": 0.0}, lambda *found: told.append(found), interval=0.01, now=lambda: clock[0]
    ).start()
    with dog.section("save"):
        clock[0] = 100.0
        assert dog.expired() is None  # no limit
    with dog.section("step"):
        clock[0] = 104.0
        assert dog.expired() is None
        with dog.section("step"):  # a new one starts anew
            clock[0] = 108.0
            assert dog.expired() is None
        clock[0] = 114.5
        until(lambda: told)
    assert told == [("step", pytest.approx(6.5))]


def test_stopping_has_a_limit_of_its_own():
    clock = [0.0]
    dog = Watchdog({"step": 100.0}, lambda *_: None, now=lambda: clock[0])
    dog.stop_within(20.0)
    clock[0] = 10.0
    dog.stop_within(20.0)  # a second request does not prolong it
    dog.enter("step")
    assert dog.expired() is None
    clock[0] = 21.0
    assert dog.expired() == ("stopping", 20.0)


def test_a_process_that_has_saved_may_take_its_time_to_end():
    clock = [0.0]
    dog = Watchdog({"step": 100.0}, lambda *_: None, now=lambda: clock[0])
    dog.stop_within(20.0)
    dog.stop_in_any_time()
    clock[0] = 21.0
    assert dog.expired() is None


def test_it_is_seen_where_the_main_thread_is():
    found = []

    def look():
        for _ in range(1000):  # the main thread may still be in start()
            found[:] = [(main_thread_at(), all_stacks())]
            if "thread.join()" in found[0][1]:
                break
            time.sleep(0.01)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    at, stacks = found[0]
    assert "test_watchdog.py" in at and "test_it_is_seen_where_the_main_thread_is" in at
    assert "MainThread" in stacks and "thread.join()" in stacks


LOOKED_AT = """
import sys, threading, time
from tfdist.control.watchdog import all_stacks, main_thread_at

end = time.monotonic() + 2

def look():
    while time.monotonic() < end:
        main_thread_at(), all_stacks()

{work}
lookers = [threading.Thread(target=look) for _ in range(2)]
[looker.start() for looker in lookers]
while any(looker.is_alive() for looker in lookers):
    work()
print("unharmed")
"""

# Collects garbage whose finalizer lets other threads run.
RUBBISH = """
import gc

def run_on():
    for number in range(100):
        number += 1

class Rubbish:
    def __init__(self):
        self.me = self
    def __del__(self):
        run_on()

def deep(levels):
    if levels:
        return deep(levels - 1) + 1
    Rubbish()
    return 1

gc.set_threshold(20, 5, 5)
sys.setswitchinterval(1e-6)

def work():
    assert deep(10) == 11
"""

# Calls Python from TensorFlow's threads, which become Python's for the time of the call.
CALLS = """
import tensorflow as tf

@tf.function(autograph=False)
def calls(times):
    def body(number):
        with tf.control_dependencies([tf.numpy_function(lambda value: value, [number], tf.int32) for _ in range(16)]):
            return number + 1
    return tf.while_loop(lambda number: number < times, body, [0])

calls(tf.constant(1))
end = time.monotonic() + 2  # importing took its time

def work():
    calls(tf.constant(200))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("work", [pytest.param(RUBBISH, id="rubbish"), pytest.param(CALLS, id="calls")])
def test_threads_that_are_looked_at_run_on_unharmed(work):
    environment = {**os.environ, "TF_NUM_INTEROP_THREADS": "4"}
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", LOOKED_AT.format(work=work)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "unharmed\n", done.stderr


def crowd(size, waiting_for=None, secret=None):
    """Beacons of `size` workers in this process."""
    peers = tuple(f"127.0.0.1:{2000 + rank}" for rank in range(size))
    dogs = [Watchdog({}, lambda *_: None) for _ in range(size)]
    endpoints, made = [None] * size, [None] * size
    gate = threading.Barrier(size)

    def make(rank):
        def exchange(endpoint):
            endpoints[rank] = endpoint
            gate.wait()
            return list(endpoints)

        cluster = Cluster("worker", rank, rank, size, peers, {"worker": list(peers)}, secret=secret or Secret())
        made[rank] = Beacons(cluster, dogs[rank], exchange, (lambda: (waiting_for or {}).get(rank)), interval=0.1)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(size)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return made, dogs


def test_a_worker_that_is_behind_is_named():
    beacons, dogs = crowd(3)
    for dog in dogs:
        dog.enter("step")
    for rank in (0, 2):
        dogs[rank].enter("evaluation")
    # Worker 1 is behind from its first report on, which may be of "start-up": the words come with its next.
    until(lambda: all(each.culprits() == [1] for each in beacons) and 'in section "step"' in beacons[0].describe(1))
    assert "worker 1 (rank 1, 127.0.0.1:2001)" in beacons[0].describe(1)


def test_a_worker_that_waits_for_nobody_is_named():
    beacons, dogs = crowd(3, waiting_for={0: 2, 1: 0})
    for dog in dogs:
        dog.enter("step")
    until(lambda: all(each.culprits() == [2] for each in beacons))


def test_nobody_is_named_when_all_are_alike():
    beacons, dogs = crowd(2)
    for dog in dogs:
        dog.enter("step")
    until(lambda: all(other.section == "step" for each in beacons for other in each._all().values()))
    assert beacons[0].culprits() == []


def test_a_silent_worker_is_named():
    beacons, _ = crowd(3)
    beacons[1].close()
    until(lambda: beacons[0].culprits() == [1] and beacons[2].silent() == [1])
    assert "last heard from" in beacons[0].describe(1)


def test_the_words_of_the_first_failure_reach_all():
    beacons, _ = crowd(3)
    beacons[0].announce("lost contact with rank 2", secondary=True)
    beacons[2].announce("the cause")
    for rank in (0, 1):
        first = beacons[rank].first_error(20)
        assert (first.rank, first.error, first.secondary) == (2, "the cause", False)
    assert beacons[2].first_error(0.2).secondary  # nobody else was a cause


def guarded(beacons):
    guard = HealthMonitor(Config(), beacons.cluster, requests=None)
    guard.watchdog.close()  # or it would end this process, whose start-up never ends, after 20 minutes
    guard.beacons = beacons
    return guard


def test_a_worker_whose_run_was_taken_over_tells_the_others_why_it_ends(monkeypatch):
    """They lost it, and ended with 6: the job was started again, though its folder belonged to another one."""
    ended, words = [], "the folder has been taken over"
    monkeypatch.setattr(exit_codes.os, "_exit", ended.append)
    beacons, _ = crowd(2)
    monkeypatch.setattr("tfdist.run.health.Beacons", lambda *_: beacons[0])
    guard = guarded(beacons[0])
    guard.connect(SimpleNamespace(waiting_for=lambda: None))
    end_worker(words)
    told = beacons[1].first_error(20)
    assert (told.error, told.code, told.secondary) == (words, ExitCode.CONFIG, False)
    guard.close()
    told_late = []
    monkeypatch.setattr(beacons[0], "announce", lambda *_, **__: told_late.append(words))
    end_worker(words)
    assert ended == [ExitCode.CONFIG] * 2 and not told_late


def test_who_hears_nobody_any_more_does_not_wait_for_errors():
    """A last snapshot that could not be written is known when all is closed: each waited five seconds in vain."""
    beacons, _ = crowd(2)
    beacons[0].close()
    begun = time.monotonic()
    beacons[0].wait_for_errors(20)
    assert time.monotonic() - begun < 10


def test_who_sees_a_shared_error_first_stays_until_the_others_have_seen_it(monkeypatch):
    """Flags that differ, for example: with the first that leaves, what the others are still receiving would be lost."""
    monkeypatch.setattr("tfdist.run.health._VERDICT_SECONDS", 60.0)
    beacons, _ = crowd(3)
    left = threading.Event()

    def first():
        guarded(beacons[1]).failed(ConfigError("the flags differ"))
        left.set()

    thread = threading.Thread(target=first)
    thread.start()
    until(lambda: beacons[0].first_error(0))
    beacons[0].announce("the flags differ")
    assert not left.wait(0.5)
    beacons[2].announce("the flags differ")
    assert left.wait(30)  # well before its time is up
    thread.join()


def test_who_alone_has_an_error_does_not_stay_for_ever(monkeypatch):
    monkeypatch.setattr("tfdist.run.health._VERDICT_SECONDS", 0.2)
    beacons, _ = crowd(2)
    error = DataError("a file is missing")
    assert guarded(beacons[1]).failed(error) is error


@pytest.mark.parametrize("error", [DataError("a file is missing"), DivergedError("NaN"), MemoryShortError("full")])
def test_who_loses_a_peer_to_an_error_that_no_new_start_mends_ends_with_its_code(error, monkeypatch):
    """Else what starts jobs again (Slurm, which goes by the highest code) would see PEER_LOST, and start it in vain."""
    monkeypatch.setattr("tfdist.run.health._VERDICT_SECONDS", 0.1)
    beacons, _ = crowd(3)
    guarded(beacons[1]).failed(error)
    until(lambda: beacons[0].first_error(0))
    found = guarded(beacons[0]).failed(PeerLostError("Lost contact with rank 1."))
    assert isinstance(found, PeerFailedError) and found.exit_code == error.exit_code
    assert str(found) == f"worker 1 (rank 1, 127.0.0.1:2001) failed: {error}"
    until(lambda: (report := beacons[2]._all()[0]).error and report.secondary)


@pytest.mark.parametrize("code", [0, ExitCode.OK, ExitCode.INTERNAL, ExitCode.STARTUP, ExitCode.HANG, 99, -9, 10**20])
def test_who_loses_a_peer_to_another_error_has_lost_a_peer(code):
    beacons, _ = crowd(2)
    beacons[1].announce("the cause", code=code)
    until(lambda: beacons[0].first_error(0))
    found = guarded(beacons[0]).failed(PeerLostError("Lost contact with rank 1."))
    assert type(found) is PeerLostError and "failed: the cause" in str(found)


def test_an_error_that_is_tfdists_own_or_unexpected_is_told_with_its_code(monkeypatch):
    monkeypatch.setattr("tfdist.run.health._VERDICT_SECONDS", 0.1)
    beacons, _ = crowd(3)
    for rank, error in ((0, KeyError("x")), (1, DataError("a file is missing"))):
        guarded(beacons[rank]).failed(error)
    until(lambda: [report.code for report in beacons[2]._all().values()] == [1, 4, 0])


def test_datagrams_of_strangers_are_ignored():
    beacons, _ = crowd(2)
    address = beacons[0]._socket.getsockname()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for data in (b"", b"hello", b"[1]", b'{"rank": 7}', b'{"rank": 1, "unknown": 2}', b"\xff" * 2000):
            stranger.sendto(data, ("127.0.0.1", address[1]))
    beacons[1].announce("still heard")
    assert beacons[0].first_error(20).error == "still heard"
