"""Slurm for real: one controller, two nodes; the job file of `tfdist.jobs slurm` trains, is signalled, is requeued,
finishes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from tests.e2e.job import ENVIRONMENT, TRAINED, records, wait_for
from tests.e2e.slurm_cluster import SlurmCluster, install

pytestmark = pytest.mark.slow

STEPS = 60


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    missing = install()
    if missing:
        pytest.skip(f"Slurm cannot be run here: {missing}")
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def submit(slurm: SlurmCluster, run_dir: Path, *train: str, own: tuple[str, ...] = ()) -> tuple[str, Path]:
    """(job id, log) of a run on two nodes."""
    run_dir.mkdir(exist_ok=True)
    script, log = run_dir / "job.sh", run_dir / "slurm.log"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "tfdist.jobs",
            "slurm",
            "--nodes=2",
            "--cpus=1",
            "--grace=30",
            "--time=10",
            "--name=digits",
            f"--python={sys.executable}",
            f"--log={log}",
            f"--write={script}",
            *own,
            "--",
            *TRAINED,
            "--progress=none",
            f"--run_dir={run_dir}",
            *train,
        ],
        env=ENVIRONMENT,
        check=True,
    )
    return slurm.run("sbatch", "--parsable", str(script)).strip(), log


def trained(run_dir: Path) -> bool:
    logs = [run_dir / "logs" / f"rank-{rank}.jsonl" for rank in range(2)]
    return all(log.exists() for log in logs) and all(records(run_dir, rank, "train") for rank in range(2))


def start_now(slurm: SlurmCluster, job: str) -> None:
    """A requeued job may start two minutes later only. Here sooner, but not in the second in which Slurm revoked the
    credentials of its last start: the nodes would take it for that one."""
    if slurm.field(job, "Reason") == "BeginTime":
        begin = datetime.fromisoformat(slurm.field(job, "StartTime"))
        if (begin - datetime.now()).total_seconds() < 115:
            slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)


def wait_until_ended(slurm: SlurmCluster, job: str, log: Path) -> str:
    """The job's last state."""

    def ended() -> bool:
        start_now(slurm, job)
        return slurm.field(job, "JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

    try:
        wait_for(ended, 150, pause=0.3)  # each look starts two commands
    except AssertionError:
        raise AssertionError(f"{slurm.field(job, 'JobState')}:\n{log.read_text()}") from None
    return slurm.field(job, "JobState")


def test_a_signalled_job_saves_is_requeued_and_finishes(slurm, tmp_path, monkeypatch):
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "pace").write_text("0.6")  # seconds a step: the signal comes before the last
    monkeypatch.setitem(slurm.environment, "TFDIST_FAULTS", "armed")
    job, log = submit(slurm, tmp_path, f"--steps={STEPS}", "--steps_per_loop=1", "--log_every=2")
    wait_for(lambda: trained(tmp_path))
    slurm.run("scancel", "--signal=TERM", job)
    (tmp_path / "faults" / "pace").unlink()
    assert wait_until_ended(slurm, job, log) == "COMPLETED", log.read_text()
    text = log.read_text()
    assert "saved on request; back to the queue (start number 2)" in text and slurm.field(job, "Restarts") == "1", text
    starts = [record["values"] for record in records(tmp_path, 0, "start")]
    assert len(starts) == 2 and all(
        start["workers"] == 2 and "tfnode1" in start["message"] and "tfnode2" in start["message"] for start in starts
    )
    last = 0
    for attempt in range(2):
        steps = [record["step"] for record in records(tmp_path, 0, "train") if record["attempt"] == attempt]
        assert last < steps[0] <= last + 4
        last = steps[-1]
    assert last == STEPS == json.loads((tmp_path / "summary.json").read_text())["steps"]


@pytest.mark.thorough
def test_a_mistake_is_not_requeued(slurm, tmp_path):
    job, log = submit(slurm, tmp_path, "--steps=10", "--model_args=width=3")
    assert wait_until_ended(slurm, job, log) == "FAILED"
    assert (
        slurm.field(job, "ExitCode").startswith("2:")
        and slurm.field(job, "Restarts") == "0"
        and "has no option 'width'" in log.read_text()
    )
