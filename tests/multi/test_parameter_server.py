"""Parameter-server jobs of real processes: a chief, two workers, two servers."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.job import records, snapshot, start, train, wait_for

pytestmark = pytest.mark.slow

FLAGS = ["--source=digits", "--export=none", "--noplot", "--save_minutes=0", "--ps_piece_kb=4"]
PARITY = [
    *FLAGS,
    "--model=tests.parity.models:dense",
    "--model_args=",
    "--global_batch=25",
    "--optimizer=sgd",
    "--learning_rate=0.1",
    "--log_every=10",
]
SERVERS = ("--ps=2",)


def process(run_dir: Path, role: str, index: int) -> int:
    """The process id of a task of the job in `run_dir`."""
    for entry in Path("/proc").iterdir():
        try:
            environment, command = (entry / "environ").read_text(), (entry / "cmdline").read_text()
        except (OSError, UnicodeDecodeError):
            continue
        found = re.search(r"TF_CONFIG=([^\0]*)", environment)
        if (
            found
            and f"--run_dir={run_dir}\0" in command
            and json.loads(found.group(1)).get("task") == {"type": role, "index": index}
        ):
            return int(entry.name)
    raise AssertionError(f"no {role} {index}")


def said(run_dir: Path, text: str) -> bool:
    return any(text in str(record["values"].get("message", "")) for record in records(run_dir))


@pytest.mark.thorough
def test_asynchronous_workers_learn_digits_though_one_is_killed(tmp_path):
    """The chief goes slowly while worker 0 is away, so that it is back before the end."""
    (tmp_path / "faults").mkdir()
    pace = tmp_path / "faults" / "pace"
    pace.write_text("0.05")
    job = start(
        2,
        [
            *FLAGS,
            "--strategy=parameter_server",
            "--model=cnn",
            "--global_batch=32",
            "--steps=500",
            "--log_every=50",
            "--learning_rate=0.002",
            "--max_staleness=8",
            f"--run_dir={tmp_path}",
        ],
        SERVERS,
        {"TFDIST_FAULTS": "armed"},
    )
    wait_for(lambda: records(tmp_path, kind="train"))
    job.send_signal(signal.SIGSTOP)  # or the worker may be back before the chief has noticed
    os.kill(process(tmp_path, "worker", 0), signal.SIGKILL)
    wait_for(lambda: said(tmp_path, "worker 0 ("))
    job.send_signal(signal.SIGCONT)
    wait_for(lambda: said(tmp_path, "is back"))
    pace.unlink()
    output, _ = job.communicate(timeout=200)
    assert job.returncode == 0, output
    assert "worker 0 was killed by signal 9 (SIGKILL); it is restarted" in output
    (begun,) = records(tmp_path, kind="start")
    assert begun["values"]["workers"] == 2 and begun["values"]["parameters"]
    lines, end = records(tmp_path, kind="train"), records(tmp_path, kind="end")[-1]
    assert (
        end["step"] == 500
        and lines[-1]["values"]["data/consumed_samples"] == 500 * 32
        and end["values"]["eval/accuracy"] >= 0.97
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    histogram = {
        int(name.removeprefix("staleness/")): count
        for name, count in summary.items()
        if re.fullmatch(r"staleness/\d+", name)
    }
    # The killed worker may have been in the middle of a batch or two, whose results nobody has.
    assert (
        495 <= sum(histogram.values()) <= 500
        and histogram[0] > 0
        and sum(histogram[staleness] for staleness in histogram if staleness) > 0
    ), summary
    assert summary["staleness/max"] == max(histogram) <= 8
    assert summary["staleness/mean"] == pytest.approx(np.average(list(histogram), weights=list(histogram.values())))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """60 steps by one device."""
    folder = tmp_path_factory.mktemp("whole")
    assert (
        train([*PARITY, "--strategy=one_device", "--steps=60", "--save_every=30", f"--run_dir={folder}"]).returncode
        == 0
    )
    return folder


@pytest.mark.thorough
def test_synchronous_servers_are_one_device(whole, tmp_path):
    """Steps by servers until SIGTERM, and the rest by one device."""
    first = tmp_path / "first"
    job = start_slowly(first, ["--save_every=30"])
    wait_for(lambda: (first / "checkpoints" / "step-00000030").exists())
    pids = [
        process(first, role, index)
        for role, index in (("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0), ("ps", 1))
    ]
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=100)
    assert job.returncode == 42, output
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    step = records(first, kind="end")[-1]["step"]
    assert 30 < step < 60 and (first / "checkpoints" / f"step-{step:08d}").exists()
    assert_close(snapshot(first, 30), snapshot(whole, 30))
    assert train([*PARITY, "--strategy=one_device", "--steps=60", f"--run_dir={first}"]).returncode == 0
    assert_close(snapshot(first, 60), snapshot(whole, 60))


def test_a_lost_server_costs_nothing(whole, tmp_path):
    """Steps by one device, and the rest by servers, of which one is killed."""
    second = tmp_path / "second"
    shutil.copytree(whole, second)
    shutil.rmtree(second / "checkpoints" / "step-00000060")
    job = start_slowly(second, ["--save_every=5"], "--max_restarts=1")
    wait_for(lambda: (second / "checkpoints" / "step-00000035").exists())
    os.kill(process(second, "ps", 1), signal.SIGKILL)
    (second / "faults" / "pace").unlink()
    output, _ = job.communicate(timeout=200)
    assert job.returncode == 0, output
    assert re.search(r"Lost ps 1 \(127.0.0.1:\d+\), with the weights: .* \(exit code 6, PEER_LOST\)", output), output
    assert "restart number 1" in output and re.search(r"resumed from .*step-000000[3-5][05]", output), output
    assert_close(snapshot(second, 60), snapshot(whole, 60))


def start_slowly(run_dir: Path, flags: list[str], *launch_flags: str):
    """60 synchronous steps, each with a pause until the file "pace" is gone."""
    (run_dir / "faults").mkdir(parents=True)
    (run_dir / "faults" / "pace").write_text("0.2")
    flags = [*PARITY, "--strategy=parameter_server", "--ps_mode=sync", "--steps=60", *flags, f"--run_dir={run_dir}"]
    return start(2, flags, (*SERVERS, *launch_flags), {"TFDIST_FAULTS": "armed"})


def assert_close(found: dict, expected: dict) -> None:
    for key, array in expected.items():
        np.testing.assert_allclose(
            found[key].astype("float64"), array.astype("float64"), rtol=0, atol=1e-6, err_msg=key
        )
