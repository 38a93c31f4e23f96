"""SIGTERM while TensorFlow connects a cluster, with a C library that takes it as TensorFlow does."""

import ctypes
import os
import signal
import subprocess
import sys
import time

import pytest

from tfdist.compat.tensorflow_preemption import sigterm_kept

# As TensorFlow's: from C, past Python, to a function that only notes it (here one that does nothing with a number).
TAKEN = "import ctypes\nc = ctypes.CDLL(None)\nc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]\n"
TAKEN += "c.signal.restype = ctypes.c_void_p\ntake = lambda: c.signal(15, ctypes.cast(c.abs, ctypes.c_void_p))\n"


def take():
    names = {}
    exec(TAKEN, names)
    names["take"]()


@pytest.fixture
def told():
    """The signals that Python's handler has got."""
    found = []
    before = signal.signal(signal.SIGTERM, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGTERM, before)


def test_it_is_given_back_while_others_are_waited_for(told):
    with sigterm_kept():
        take()
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)
        assert told == [signal.SIGTERM]


def test_it_is_given_back_at_the_end_where_the_lock_is_held_all_the_time(told):
    lock_kept = ctypes.PyDLL(None)
    lock_kept.usleep(1000)
    with sigterm_kept():
        take()
        lock_kept.usleep(50_000)
    os.kill(os.getpid(), signal.SIGTERM)
    assert told == [signal.SIGTERM]


def test_who_has_no_handler_ends():
    program = TAKEN + (
        "import os, time\nfrom tfdist.compat.tensorflow_preemption import sigterm_kept\n"
        "with sigterm_kept():\n    take()\n    time.sleep(0.5)\n    os.kill(os.getpid(), 15)\n    time.sleep(5)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == -signal.SIGTERM
