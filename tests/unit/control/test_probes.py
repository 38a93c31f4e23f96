"""Knocking at real ports."""

import socket
import time

import pytest

from tfdist.control.exit_codes import StartupError
from tfdist.control.probes import Prober, await_all


def listener():
    made = socket.create_server(("127.0.0.1", 0))
    return made, f"127.0.0.1:{made.getsockname()[1]}"


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_who_goes_is_missed_and_who_comes_back_is_not():
    first, here = listener()
    second, there = listener()
    watch = Prober({"ps 0": here, "ps 1": there}, interval=0.01)
    with first:
        second.close()
        until(lambda: watch.gone() == ["ps 1"])
        with socket.create_server(("127.0.0.1", int(there.rpartition(":")[2])), reuse_port=True):
            until(lambda: watch.gone() == [])
    watch.close()


def test_those_that_do_not_appear_are_named():
    made, address = listener()
    free, nobody = listener()
    free.close()
    with made:
        await_all({"worker 0": address}, 5)
        with pytest.raises(StartupError, match="^ps 0 did not appear within 0.3 s"):
            await_all({"worker 0": address, "ps 0": nobody}, 0.3)
        await_all({"ps 0": nobody}, 5, give_up=lambda: True)
