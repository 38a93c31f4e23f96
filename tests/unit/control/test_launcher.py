"""The launcher, with small scripts in place of workers."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tfdist import launch
from tfdist.control.exit_codes import ConfigError, ExitCode
from tfdist.control.launcher import LocalJob, PortReservation


def job(tmp_path, code, workers=2, **options):
    script = tmp_path / "worker.py"
    script.write_text("import json, os, signal, sys, time\nrank = json.loads(os.environ['TF_CONFIG'])['task']['index'] if 'TF_CONFIG' in os.environ else 0\n" + code)
    output = io.StringIO()
    return LocalJob([sys.executable, str(script)], workers, tmp_path / "logs", output=output, **{"grace": 2.0, **options}), output


def run(made):
    made.start()
    return made.wait()


def test_output_is_prefixed_and_logged(tmp_path):
    made, output = job(tmp_path, "print('hello from', rank); print('x' * 100_000); sys.stdout.buffer.write(b'\\xff bytes'); sys.stdout.flush()")
    result = run(made)
    assert (result.code, result.cause, result.exit_codes) == (0, "", {"worker 0": 0, "worker 1": 0})
    lines = output.getvalue().splitlines()
    for rank in (0, 1):
        assert f"[worker {rank}] hello from {rank}" in lines
        assert f"[worker {rank}] \N{REPLACEMENT CHARACTER} bytes" in lines
        log = (tmp_path / "logs" / f"worker-{rank}.log").read_bytes()
        assert b"hello from" in log and b"\xff bytes" in log and b"x" * 100_000 in log


def test_hidden_ranks_are_still_logged(tmp_path):
    made, output = job(tmp_path, "print('hello')", show={0})
    run(made)
    assert "[worker 1]" not in output.getvalue() and "hello" in (tmp_path / "logs" / "worker-1.log").read_text()


@pytest.mark.parametrize("code, exit_code, words", [
    ("print('tfdist: error: no such data (exit code 4, DATA)') if rank else time.sleep(60)\nsys.exit(4)", 4, ["worker 1", "exit code 4", "DATA", "no such data"]),
    ("os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(60)", ExitCode.PEER_LOST, ["worker 1", "SIGKILL"]),
    # Worker 0 notices the death of worker 1 first: it is not the cause.
    ("time.sleep(0.5 * rank)\nsys.exit(3 if rank else 6)", 3, ["worker 1", "CLUSTER"]),
    ("time.sleep(0.5 * rank)\nsys.exit(6)", 6, ["worker 0"]),
])
def test_the_first_failure_stops_all_and_is_named(tmp_path, code, exit_code, words):
    made, _ = job(tmp_path, code)
    start = time.monotonic()
    result = run(made)
    assert result.code == exit_code
    assert all(word in result.cause for word in words), result.cause
    assert time.monotonic() - start < 30


def test_a_worker_that_ignores_sigterm_is_killed(tmp_path):
    made, _ = job(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\nif rank: time.sleep(1); sys.exit(4)\ntime.sleep(60)", grace=0.5)
    result = run(made)
    assert result.code == 4 and result.exit_codes["worker 0"] == -signal.SIGKILL


def test_environment_of_the_workers(tmp_path):
    made, output = job(tmp_path, "print(json.dumps([os.environ['TF_CONFIG'], os.environ['OMP_NUM_THREADS'], sorted(os.sched_getaffinity(0)), os.environ['TF_GRPC_REUSE_PORT']]))")
    run(made)
    found = sorted(json.loads(line.partition("] ")[2]) for line in output.getvalue().splitlines())
    specs = [json.loads(text)["cluster"]["worker"] for text, *_ in found]
    assert specs[0] == specs[1] and len(set(specs[0])) == 2
    cores = len(os.sched_getaffinity(0))
    if cores >= 2:
        assert not set(found[0][2]) & set(found[1][2]) and found[0][1] == str(cores // 2)


def test_one_worker_has_no_cluster(tmp_path):
    made, output = job(tmp_path, "print('TF_CONFIG' in os.environ)", workers=1)
    run(made)
    assert "False" in output.getvalue()


def test_ports_are_unique_and_stay_ours():
    reservations = [PortReservation(20) for _ in range(10)]
    addresses = [address for reservation in reservations for address in reservation.addresses]
    assert len(set(addresses)) == 200
    import socket

    with socket.socket() as intruder, pytest.raises(OSError):
        intruder.bind(("", int(addresses[0].rpartition(":")[2])))
    for reservation in reservations:
        reservation.close()


LAUNCHER = """
import sys
from pathlib import Path
from tfdist import launch
from tfdist.control.launcher import LocalJob
from tfdist.control.supervisor import RestartPolicy, Supervisor
logs = Path(sys.argv[2])
sys.exit(launch.run(Supervisor(lambda: LocalJob([sys.executable, sys.argv[1]], 2, logs, grace=5.0), RestartPolicy(3), lambda: -1), logs))
"""


def start_launcher(tmp_path, code):
    script = tmp_path / "worker.py"
    script.write_text("import os, pathlib, signal, sys, time\npathlib.Path(sys.argv[0]).with_name(f'pid-{os.getpid()}').touch()\n" + code)
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(script), str(tmp_path / "logs")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                env={**os.environ, "PYTHONPATH": os.getcwd()})
    deadline = time.monotonic() + 20
    while len(list(tmp_path.glob("pid-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    return launcher, [int(path.name[4:]) for path in tmp_path.glob("pid-*")]


def gone(pids):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2] for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_a_killed_launcher_leaves_no_orphans(tmp_path):
    launcher, pids = start_launcher(tmp_path, "time.sleep(60)")
    launcher.kill()
    launcher.wait()
    assert len(pids) == 2 and gone(pids)


def test_sigterm_is_passed_on_and_so_is_the_exit_code(tmp_path):
    launcher, pids = start_launcher(tmp_path, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))\nprint('ready', flush=True)\ntime.sleep(60)")
    time.sleep(0.5)  # until the handlers are installed
    launcher.terminate()
    assert launcher.wait(timeout=20) == 42
    assert gone(pids)


def test_usage(capsys):
    for argv, words in [(["--worker=2", "--", "--steps=1"], ["--worker"]), (["--workers=0", "--"], ["--workers=0"]), (["--workers=x", "--"], ["--workers"]),
                        (["--workers=2", "--", "--stesp=1"], ["--stesp"]), (["--workers=2", "--show_ranks=a", "--"], ["--show_ranks=a"])]:
        with pytest.raises(ConfigError) as error:
            launch.main(argv)
        assert all(word in str(error.value) for word in words)
