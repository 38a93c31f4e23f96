"""Workers that come and go without a restart: those that are left keep their processes and what they have in memory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.job import TRAINED, children, records, run, snapshot, start, wait_for
from tfdist.telemetry.jsonl import read_jsonl

SLOW_MACHINE_SECONDS = 300
STEPS = 50
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("horovod")]

IDENTIFIED = [
    *TRAINED,
    "--source=tests.e2e.sources:identified",
    "--objective=tests.e2e.sources:identifying",
    "--model_args=widths=(16,),num_outputs=2",
    "--optimizer=momentum",
    "--log_every=1",
    f"--steps={STEPS}",
    "--grace_period=200",
]
ELASTIC = ("--elastic", "--min_workers=2", "--grace=200")


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
    """Step -> checksums of the samples of its global batch. A step that was done again must have seen the same samples.
    From the
    logs of all ranks: a chief may be lost after a step and before it has told of it."""
    seen: dict[int, tuple] = {}
    ranks = len(list((run_dir / "logs").glob("rank-*.jsonl")))
    for record in [record for rank in range(ranks) for record in records(run_dir, rank, "train")]:
        values = (
            record["values"]["train/first_checksum"],
            record["values"]["train/second_checksum"],
            record["values"]["data/consumed_samples"],
        )
        assert seen.setdefault(record["step"], values) == values, (
            f"step {record['step']} was done again with other samples"
        )
    return seen


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """By one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run(1, [*IDENTIFIED, f"--run_dir={folder}"])
    return folder


@contextlib.contextmanager
def elastic_job(run_dir: Path) -> Iterator[tuple[subprocess.Popen, list[str]]]:
    """(launcher, flags) of three workers that train, slowly, so that there is time for changes."""
    (run_dir / "faults").mkdir()
    (run_dir / "faults" / "pace").write_text("1.5")  # seconds a call
    flags = [*IDENTIFIED, "--strategy=horovod", "--steps_per_loop=1", f"--run_dir={run_dir}"]
    process = start(3, flags, ELASTIC, {"TFDIST_FAULTS": "armed"})
    try:
        wait_for(lambda: groups(run_dir) == [(3, 0)], SLOW_MACHINE_SECONDS)
        yield process, flags
    finally:
        process.kill()


def assert_same_run(run_dir: Path, other: Path) -> None:
    """The same batches, and at the end the same state at rounding."""
    assert batches(run_dir) == batches(other) and len(batches(run_dir)) == STEPS
    many, one = snapshot(run_dir, STEPS), snapshot(other, STEPS)
    for key, array in one.items():
        np.testing.assert_allclose(array.astype("float64"), many[key].astype("float64"), rtol=0, atol=2e-6, err_msg=key)


@pytest.mark.parametrize("lost", [1, pytest.param(0, marks=pytest.mark.thorough)])
def test_a_lost_worker_is_done_without_and_replaced(lost, undisturbed, tmp_path):
    """SIGKILL to one of three (0: the chief).

    The two others go on in the same processes, without a snapshot; a third joins.
    """
    with elastic_job(tmp_path) as (process, _):
        before = children(process.pid)
        os.kill(before[lost], signal.SIGKILL)
        newcomers: list[int] = []

        def comes() -> bool:
            newcomers[:] = set(children(process.pid)) - set(before)
            return bool(newcomers)

        # Stopped at once: half a second later it is ready, maybe before both others have noticed the loss, and these
        # wait for it in a group of three.
        wait_for(comes, SLOW_MACHINE_SECONDS, pause=0.005)
        (newcomer,) = newcomers
        os.kill(newcomer, signal.SIGSTOP)
        wait_for(lambda: [workers for workers, _ in groups(tmp_path)] == [3, 2], SLOW_MACHINE_SECONDS)
        os.kill(newcomer, signal.SIGCONT)
        wait_for(lambda: [workers for workers, _ in groups(tmp_path)] == [3, 2, 3], SLOW_MACHINE_SECONDS)
        after = children(process.pid)
        (tmp_path / "faults" / "pace").unlink()
        output, _ = process.communicate(timeout=SLOW_MACHINE_SECONDS)
    assert process.returncode == 0, output
    assert set(before) - set(after) == {before[lost]} and len(after) == 3, (before, after)
    assert f"worker {lost} was killed by signal 9 (SIGKILL); 2 of 3 workers are left" in output
    assert "resumed from" not in output and output.count("continued from memory: step") >= 2, output
    assert_same_run(tmp_path, undisturbed)


@pytest.mark.thorough
def test_a_stop_while_the_group_changes_saves_what_is_in_memory(undisturbed, tmp_path):
    """SIGTERM right after the loss of the chief; then another job, of two workers, goes on from there."""
    with elastic_job(tmp_path) as (process, flags):
        os.kill(children(process.pid)[0], signal.SIGKILL)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=SLOW_MACHINE_SECONDS)
    assert process.returncode == 42, output
    saved = [int(path.name.removeprefix("step-")) for path in (tmp_path / "checkpoints").glob("step-*")]
    assert len(saved) == 1 and 0 < saved[0] < STEPS, saved
    assert f"step {saved[0]}," in run(2, flags)
    assert_same_run(tmp_path, undisturbed)
