"""Ray jobs, as far as they go without a Ray cluster: the part that runs on a node, and what the launcher refuses."""

import os
import signal
import sys
import time

import pytest

from tfdist.control.exit_codes import ConfigError, UnsupportedError
from tfdist.launcher import ray_cluster
from tfdist.launcher.launch_options import parse_launch_options
from tfdist.launcher.ray_worker import RayWorker


def started(code, **environment):
    worker = RayWorker("127.0.0.1")
    assert worker.start(["-c", "import os, signal, sys, time\n" + code], environment, os.getcwd()) == ""
    return worker


def collect(worker, signals=(), until=lambda output: False):
    """(output, exit code), fetched piece by piece."""
    output, code, deadline = b"", None, time.monotonic() + 20
    while code is None and not until(output):
        assert time.monotonic() < deadline, output
        data, code = worker.exchange(len(output), signals)
        output, signals = output + data, ()
    return output, code


def test_output_arrives_whole_and_then_the_exit_code():
    worker = started("sys.stdout.write('x' * 3_000_000); sys.exit(7)")
    assert collect(worker) == (b"x" * 3_000_000, 7)


def test_an_answer_that_was_lost_is_given_again():
    worker = started("os.write(1, b'hello\\n'); sys.exit(3)")
    collect(worker, until=lambda output: output == b"hello\n")
    assert worker.exchange(0, ())[0] == b"hello\n"
    assert collect(worker) == (b"hello\n", 3)


def test_a_start_whose_answer_was_lost_starts_no_second_process():
    """Both had one TF_CONFIG and one rank; only the second was watched and got signals."""
    worker = started("print(os.getpid(), flush=True); sys.stdin.read(); sys.exit(3)")
    first = worker._process
    assert worker.start(["-c", "raise SystemExit(4)"], {}, os.getcwd()) == ""
    assert worker._process is first
    worker.exchange(0, [signal.SIGKILL])
    assert collect(worker)[1] == -signal.SIGKILL


def asked(worker, answer):
    """Waits until the worker is ready, and sends SIGUSR1 until it answers."""
    collect(worker, until=lambda output: output == b"ready\n")
    deadline = time.monotonic() + 20
    while (given := worker.exchange(6, [signal.SIGUSR1], 0))[0] != answer:
        assert time.monotonic() < deadline, given


def ended(worker):
    """Sends SIGTERM, and returns what the worker has said since it was ready, and its exit code."""
    deadline = time.monotonic() + 20
    while (answer := worker.exchange(6, [signal.SIGTERM], 1))[1] is None:
        assert time.monotonic() < deadline
    return answer


def test_signals_of_a_request_that_is_repeated_are_passed_on_once():
    worker = started(
        # sigwait takes the lower number first, and none that is pending is passed over.
        "both = {signal.SIGUSR1, signal.SIGTERM}\nsignal.pthread_sigmask(signal.SIG_BLOCK, both)\n"
        "os.write(1, b'ready\\n')\n"
        "while signal.sigwait(both) == signal.SIGUSR1: os.write(1, b'one\\n')\n"
        "sys.exit(42)"
    )
    asked(worker, b"one\n")
    worker.exchange(6, [signal.SIGUSR1], 0)
    assert ended(worker) == (b"one\n", 42)


def test_a_program_that_a_worker_has_started_gets_no_signals():
    worker = started(
        # os.write: a handler must not print while the program still does
        "import subprocess\n"
        "signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'asked\\n'))\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.2), os._exit(1 if helper.poll() else 42)))\n"
        "helper = subprocess.Popen(['sleep', '60'])\n"
        "os.write(1, b'ready\\n')\n"
        "while True: time.sleep(0.1)"  # a signal that comes just before it waits for its end
    )
    asked(worker, b"asked\n")
    assert ended(worker) == (b"asked\n", 42)


@pytest.mark.slow
def test_signals_are_passed_on_and_descendants_do_not_survive():
    worker = started(
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(42))\nif not os.fork(): time.sleep(60)\nprint('ready',"
        " os.getpid(), flush=True); time.sleep(60)"
    )
    output, _ = collect(worker, until=lambda output: output.count(b"ready") == 1)
    assert collect(worker, [signal.SIGTERM])[1] == 42
    group = worker._process.pid
    with pytest.raises(ProcessLookupError):
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.02)


def test_the_environment_comes_on_top_and_both_python_paths_count(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/node")
    worker = started("print(os.environ['TF_X'], os.environ['PYTHONPATH'])", TF_X="1", PYTHONPATH="/launcher")
    assert collect(worker)[0] == b"1 /launcher:/node\n"


def test_the_port_is_reserved():
    host, _, port = RayWorker("::1").address().rpartition(":")
    assert host == "[::1]" and int(port) > 0


def test_without_ray_the_command_to_install_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnsupportedError, match="pip install"):
        ray_cluster.connect()


@pytest.mark.parametrize(
    "flags",
    [
        ["--on=ray", "--ps=1"],
        ["--on=ray", "--evaluator"],
        ["--on=ray", "--standby"],
        ["--on=ray", "--elastic"],
        ["--on=ray", "--min_workers=1", "--discover=x"],
        ["--cpus_per_worker=2"],
    ],
)
def test_flags_that_do_not_go_together(flags):
    with pytest.raises(ConfigError, match=flags[-1].partition("=")[0]):
        parse_launch_options(flags, "", epilog="")


def test_on_ray_a_lost_node_is_survived_without_further_flags():
    assert (
        parse_launch_options(["--on=ray"], "", epilog="").max_restarts == 3
        and parse_launch_options([], "", epilog="").max_restarts == 0
    )
