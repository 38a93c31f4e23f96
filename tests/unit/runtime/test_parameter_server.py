"""A worker or a parameter server: what it does when it is asked to end."""

import contextlib
import os
import signal

import pytest
import tensorflow as tf

from tfdist.config import Config
from tfdist.control import signals
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ExitCode
from tfdist.runtime import parameter_server

SPEC = {"chief": ["localhost:1"], "worker": ["localhost:2"], "ps": ["localhost:3"]}


@pytest.mark.parametrize("later", [0.0, 2.0])
def test_a_server_waits_for_the_chief_though_its_sigterm_is_sent_twice(monkeypatch, later):
    """Some engines signal a process and its group. Its weights were gone before the chief had saved them."""
    now, ended, handlers = [100.0], [], {}

    class Chief:
        def __init__(self, _):
            pass

        def gone(self):
            handlers[signal.SIGTERM](signal.SIGTERM, None)
            now[0] += later
            handlers[signal.SIGTERM](signal.SIGTERM, None)
            return ["chief"]

    monkeypatch.setenv("TF_NUM_INTEROP_THREADS", "1")  # which it sets
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(tf.distribute, "Server", lambda *_, **__: None)
    monkeypatch.setattr(parameter_server, "Prober", Chief)
    monkeypatch.setattr(parameter_server, "await_all", lambda *_: None)
    monkeypatch.setattr(parameter_server, "own_address_only", lambda *_: contextlib.nullcontext())
    cluster = Cluster("ps", 0, -1, 2, ("localhost:1", "localhost:2"), SPEC)
    assert parameter_server.serve(Config(), cluster, lambda: False) == ExitCode.PREEMPTED
    assert ended == ([128 + signal.SIGTERM] if later else [])
