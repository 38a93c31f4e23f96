"""Signals as requests: which one asks for what, and which ends the process."""

import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tfdist.control import signals
from tfdist.control.signals import SignalRequests


@pytest.fixture
def clock(monkeypatch):
    """Seconds that the handlers see; no process ends."""
    now = SimpleNamespace(seconds=100.0, ended=[])
    monkeypatch.setattr(signals.time, "monotonic", lambda: now.seconds)
    monkeypatch.setattr(signals.os, "_exit", now.ended.append)
    monkeypatch.setattr(signals, "say_at_once", lambda line: None)
    return now


@pytest.fixture
def requests(clock):
    found = SignalRequests()
    found.told = []
    found.on_stop = lambda: found.told.append(clock.seconds)
    return found


def test_a_second_sigterm_ends_at_once_unless_it_is_the_same(requests, clock):
    requests._on_stop(signal.SIGTERM)
    assert requests.stop and not clock.ended
    clock.seconds += 0.5
    requests._on_stop(signal.SIGTERM)
    assert not clock.ended
    clock.seconds += 1
    requests._on_stop(signal.SIGTERM)
    assert clock.ended == [128 + signal.SIGTERM] and requests.told == [100.0]


@pytest.mark.parametrize("first", ["notice", "hup"])
def test_the_first_sigterm_is_no_second_one_whatever_came_before(requests, clock, first):
    """A platform gives notice, and then sends SIGTERM: while all save."""
    if first == "notice":
        requests.stop = True
    else:
        requests._on_stop(signal.SIGHUP)
    clock.seconds += 10
    requests._on_stop(signal.SIGTERM)
    assert requests.stop and not clock.ended and requests.told == [110.0 if first == "notice" else 100.0]
    clock.seconds += 10
    requests._on_stop(signal.SIGTERM)
    assert clock.ended


def test_once_all_is_saved_no_signal_says_that_something_is_not(requests, clock, monkeypatch):
    """A run that had finished, and was closing its trackers, ended with "Not saved" and 7."""
    said = []
    monkeypatch.setattr(signals, "say_at_once", said.append)
    requests.all_saved = True
    requests._on_stop(signal.SIGTERM)
    clock.seconds += 10
    requests._on_stop(signal.SIGTERM)
    assert not requests.told and clock.ended == [128 + signal.SIGTERM]
    assert said == [
        "tfdist: SIGTERM: training is over; the run is being completed.",
        "tfdist: second SIGTERM: ending at once; training was over.",
    ]


def test_a_closed_terminal_asks_once_more_in_vain(requests, clock):
    for _ in range(3):
        requests._on_stop(signal.SIGHUP)
        clock.seconds += 10
    assert requests.stop and requests.told == [100.0] and not clock.ended


SCRIPT = """
import os, signal, sys
from tfdist.control.signals import SignalRequests
signal.signal(signal.SIGHUP, signal.{before})
requests = SignalRequests().install()
os.kill(os.getpid(), signal.SIGHUP)
sys.exit(42 if requests.stop else 0)
"""


@pytest.mark.parametrize("before, code", [("SIG_DFL", 42), ("SIG_IGN", 0)])
def test_a_closed_terminal_asks_to_stop_but_not_under_nohup(before, code):
    assert subprocess.run([sys.executable, "-c", SCRIPT.format(before=before)], check=False).returncode == code


FORKS = """
import multiprocessing, os, signal, sys, time
from tfdist.control.signals import SignalRequests
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # not under nohup
signal.signal(signal.SIGUSR2, lambda *_: None)  # telemetry/profiler.py
for _ in range(2):  # a process may install them for several groups of workers
    SignalRequests().install()
ours = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)]
waiting = multiprocessing.Semaphore(0)
told, tell = os.pipe()
helper = os.fork()
if not helper:
    os.write(tell, b".")
    time.sleep(60)
    os._exit(1)
os.read(told, 1)
for name in ("USR1", "USR2", "HUP"):
    os.kill(helper, getattr(signal, f"SIG{name}"))
time.sleep(0.2)
assert os.waitpid(helper, os.WNOHANG) == (0, 0)

def asked_to_end(helper):
    os.kill(helper, signal.SIGTERM)
    deadline = time.monotonic() + 10
    while not (ended := os.waitpid(helper, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(helper, signal.SIGKILL)
            sys.exit("SIGTERM did not end it")
        time.sleep(0.001)
    assert os.waitstatus_to_exitcode(ended[1]) == -signal.SIGTERM

asked_to_end(helper)
for number in range(60):  # at any moment after the fork, also as it begins to wait
    if not (helper := os.fork()):
        waiting.acquire()
    time.sleep(0.0001 * (number % 8))
    asked_to_end(helper)
assert ours == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)]
"""


def test_a_process_that_is_forked_ends_when_it_is_asked_to():
    """Python's multiprocessing asks a data source's helpers by SIGTERM at the end, and waits for them: for ever."""
    found = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, check=False, process_group=0
    )
    assert not found.returncode, found.stderr
