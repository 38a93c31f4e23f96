"""tfdist.doctor as its users run it."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.attacker import processes
from tests.e2e.job import ENVIRONMENT, wait_for

DOCTOR = [sys.executable, "-m", "tfdist.doctor"]


def doctor(*flags, **environment):
    return subprocess.run(
        [*DOCTOR, *flags], env={**ENVIRONMENT, **environment}, capture_output=True, text=True, timeout=240
    )


def test_workers_of_this_machine(tmp_path):
    ended = doctor("--workers=2", "--noarithmetic", f"--run_dir={tmp_path}")
    assert ended.returncode == 0 and "worker 1 (rank 1, 127.0.0.1:" in ended.stdout, ended
    assert "Fit to train: " in ended.stdout and "Not fit" not in ended.stdout
    assert "fine     all-reduce: of 16 MiB by TCP" in ended.stdout and "clocks: at most 0.0 s apart" in ended.stdout


def test_on_workers_of_the_launcher(tmp_path):
    launcher = [sys.executable, "-m", "tfdist.launch", "--workers=2", "--", "-m", "tfdist.doctor"]
    ended = subprocess.run(
        [*launcher, "--noarithmetic", f"--run_dir={tmp_path}"],
        env=ENVIRONMENT,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0 and "Fit to train: " in ended.stdout, ended
    assert "Fit to train: " in (tmp_path / "runs" / "tfdist.doctor" / "logs" / "worker-0.log").read_text()


def test_one_unhealthy_worker_makes_all_unhealthy():
    ended = doctor("--workers=2", "--noarithmetic", "--run_dir=/proc/tfdist")
    assert ended.returncode == 13 and "WRONG    run folder: --run_dir=/proc/tfdist" in ended.stdout, ended
    assert "Not fit to train: 2 of " in ended.stdout
    ended = doctor(
        "--noarithmetic",
        TF_CONFIG='{"cluster": {"worker": ["127.0.0.1:1234", "nowhere.invalid:1"]}, "task":'
        ' {"type": "worker", "index": 0}}',
    )
    assert ended.returncode == 13 and "worker 1 (rank 1, nowhere.invalid:1) is not known here" in ended.stdout, ended


@pytest.mark.slow
def test_arithmetic_of_this_machine(tmp_path):
    ended = doctor(f"--run_dir={tmp_path}")
    assert ended.returncode == 0 and "fine     arithmetic: 12 trials are right" in ended.stdout, ended


def trials_of(process):
    found = set()
    for pid in processes(process.pid):
        with contextlib.suppress(OSError):  # it is gone again
            found |= {pid} if b"diagnosis.trial" in Path(f"/proc/{pid}/cmdline").read_bytes() else set()
    return found


@pytest.mark.slow
def test_whoever_ends_it_ends_its_trials(tmp_path):
    process = subprocess.Popen([*DOCTOR, f"--run_dir={tmp_path}"], env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    wait_for(lambda: trials_of(process), 60)
    trials = trials_of(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in trials), 20)
