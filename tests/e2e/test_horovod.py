"""Whole runs by Horovod: the same weights and the same snapshots as by multi_worker, and a worker that falls silent."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.job import TRAINED, children, records, run, snapshot, start, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("horovod")]

FLAGS = [*TRAINED, "--steps=50", "--save_every=25", "--optimizer=sgd", "--learning_rate=0.1"]


def assert_same_weights(one: Path, other: Path) -> None:
    a, b = snapshot(one, 50), snapshot(other, 50)
    assert a.keys() == b.keys()
    for key in a:
        np.testing.assert_allclose(a[key].astype("float64"), b[key].astype("float64"), rtol=0, atol=1e-6, err_msg=key)


def test_the_same_weights_and_interchangeable_snapshots(tmp_path):
    """50 steps of SGD by each; then 25 by the one and 25 by the other."""
    for strategy in ("multi_worker", "horovod"):
        run(2, [*FLAGS, f"--strategy={strategy}", f"--run_dir={tmp_path / strategy}"])
    first, last = snapshot(tmp_path / "horovod", 25), snapshot(tmp_path / "horovod", 50)
    assert any(np.abs(last[key] - first[key]).max() > 1e-3 for key in first if key.startswith("model/")), (
        "nothing was learned"
    )
    assert_same_weights(tmp_path / "multi_worker", tmp_path / "horovod")
    for begun, ended in (("multi_worker", "horovod"), ("horovod", "multi_worker")):
        folder = tmp_path / f"{begun}-{ended}"
        shutil.copytree(tmp_path / begun, folder)
        shutil.rmtree(folder / "checkpoints" / "step-00000050")
        output = run(2, [*FLAGS, f"--strategy={ended}", "--resume=must", f"--run_dir={folder}"])
        assert f"resumed from {folder}/checkpoints/step-00000025" in output and f"; {ended}; " in output
        assert_same_weights(tmp_path / "multi_worker", folder)


@pytest.mark.thorough
def test_a_stopped_worker_is_noticed(tmp_path):
    process = start(
        2,
        [
            *TRAINED,
            "--steps=100000000",
            "--strategy=horovod",
            "--heartbeat_timeout=2",
            "--progress=none",
            f"--run_dir={tmp_path}",
        ],
        ("--grace=1",),
    )
    wait_for(
        lambda: all(
            (tmp_path / "logs" / f"rank-{rank}.jsonl").exists() and records(tmp_path, rank, "train") for rank in (0, 1)
        )
    )
    os.kill(children(process.pid)[1], signal.SIGSTOP)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 6 and "Horovod stopped: a worker died, was silent for --heartbeat_timeout" in output, (
        output
    )


@pytest.mark.parametrize("strategy", [pytest.param("multi_worker", marks=pytest.mark.thorough), "horovod"])
def test_weights_that_differ_stop_the_run_before_they_are_saved(strategy, tmp_path):
    output = run(
        2,
        [
            *TRAINED,
            f"--strategy={strategy}",
            "--model=tests.e2e.faults:unreduced_on_rank_1",
            "--model_args=",
            "--steps=20",
            f"--run_dir={tmp_path}",
        ],
        code=8,
    )
    assert "The weights of rank 1 differ from the chief's at step 20" in output, output
    assert not list((tmp_path / "checkpoints").glob("step-*"))
