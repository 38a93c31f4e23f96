"""Workers that come and go without a restart: those that are left keep their processes and what they have in memory."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.job import CLUSTERS, records, run, snapshot, start, wait_for
from tfdist.telemetry.jsonl import read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("horovod")]

IDENTIFIED = [*CLUSTERS, "--source=tests.e2e.sources:identified", "--objective=tests.e2e.sources:identifying", "--model_args=widths=(16,),num_outputs=2",
              "--optimizer=momentum", "--log_every=1", "--steps=400", "--eval_every=-1"]
ELASTIC = ("--elastic", "--min_workers=2")


def groups(run_dir: Path) -> list[tuple[int, int]]:
    """(workers, first step) of every group so far that has begun to train."""
    found: list[tuple[int, int]] = []
    started = None
    for record in read_jsonl(run_dir / "logs" / "rank-0.jsonl"):
        if record["kind"] == "start":
            started = record["values"]["workers"], record["step"]
        elif record["kind"] == "train" and started:
            found.append(started)
            started = None
    return found


def batches(run_dir: Path) -> dict[int, tuple]:
    """Step -> checksums of the samples of its global batch. A step that was done again must have seen the same samples."""
    seen: dict[int, tuple] = {}
    for record in records(run_dir, kind="train"):
        values = record["values"]["train/first_checksum"], record["values"]["train/second_checksum"], record["values"]["data/consumed_samples"]
        assert seen.setdefault(record["step"], values) == values, f"step {record['step']} was done again with other samples"
    return seen


def children(process: subprocess.Popen) -> list[int]:
    return [int(pid) for pid in subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout.split()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """By one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run(1, [*IDENTIFIED, f"--run_dir={folder}"])
    return folder


@pytest.mark.parametrize("lost", [1, 0])
def test_a_lost_worker_is_done_without_and_replaced(lost, undisturbed, tmp_path):
    """SIGKILL to one of three (0: the chief). The two others go on in the same processes, without a snapshot; a third joins;
    batches and end are those of an undisturbed run."""
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "pace").write_text("0.05")  # seconds a call, so that there is time for changes
    flags = [*IDENTIFIED, "--strategy=horovod", "--steps_per_loop=1", f"--run_dir={tmp_path}"]
    process = start(3, flags, ELASTIC, {"TFDIST_FAULTS": "armed"})
    try:
        wait_for(lambda: groups(tmp_path) == [(3, 0)])
        before = children(process)
        os.kill(before[lost], signal.SIGKILL)
        wait_for(lambda: [workers for workers, _ in groups(tmp_path)] == [3, 2])
        wait_for(lambda: [workers for workers, _ in groups(tmp_path)] == [3, 2, 3])
        after = children(process)
        (tmp_path / "faults" / "pace").unlink()
        output, _ = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert set(before) - set(after) == {before[lost]} and len(after) == 3, (before, after)
    assert f"worker {lost} was killed by signal 9 (SIGKILL); the others go on" in output
    assert not list((tmp_path / "checkpoints").glob("step-*"))[1:], "only the last step is saved, so nothing was restored from there"
    assert batches(tmp_path) == batches(undisturbed) and len(batches(tmp_path)) == 400
    one, many = snapshot(undisturbed, 400), snapshot(tmp_path, 400)
    for key, array in one.items():
        np.testing.assert_allclose(array.astype("float64"), many[key].astype("float64"), rtol=0, atol=2e-6, err_msg=key)
