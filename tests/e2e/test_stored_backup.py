"""--backup_dir=URL: a run whose machine is lost, with its run folder, goes on elsewhere from what is in the store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.e2e import job, test_fit_scripts
from tests.e2e.test_object_store import FLAGS, arrays, environment, pace, same  # noqa: F401
from tests.stores.s3_server import BUCKET

BACKUP = "backups/one"
URL = f"s3://{BUCKET}/{BACKUP}"


@pytest.mark.slow
def test_a_machine_that_is_lost_is_replaced_by_another(s3, tmp_path):
    """Killed when the store has a backup; on the other machine neither the run folder nor the cache has anything."""
    flags = [*FLAGS, "--steps=40", "--save_every=0"]
    job.run(1, [*flags, f"--run_dir={tmp_path / 'undisturbed'}"])

    def of_machine(name: str) -> list[str]:
        backup = [f"--backup_dir={URL}", "--backup_every=5"]
        return [*flags, *backup, f"--run_dir={tmp_path / name / 'run'}", f"--cache_dir={tmp_path / name}"]

    pace(tmp_path / "first" / "run", 0.2)
    command = [sys.executable, "-m", "tfdist.train", *of_machine("first"), "--steps_per_loop=1"]
    process = subprocess.Popen(command, env={**job.ENVIRONMENT, "TFDIST_FAULTS": "armed"})
    job.wait_for(lambda: process.poll() is not None or any("/manifest" in name for name in s3.names(BACKUP)))
    assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    ended = job.train(of_machine("second"))
    assert ended.returncode == 0 and "resumed from" in ended.stdout + ended.stderr, ended.stdout + ended.stderr
    assert same(arrays(tmp_path / "second" / "run"), arrays(tmp_path / "undisturbed"))
    assert not s3.names(BACKUP), "it is deleted when the run has finished"


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [0, 1])
def test_a_fit_that_is_killed_goes_on_elsewhere(s3, tmp_path, monkeypatch, victim):
    """By SIGKILL, the chief who sends or another; the other machine has nothing of it but the script."""
    script, folders = test_fit_scripts.SCRIPTS / "killed.py", [tmp_path / name for name in ("first", "second", "alone")]
    for folder in folders:
        folder.mkdir()
    first, second, alone = folders
    undisturbed = test_fit_scripts.run(script, 2, alone)
    monkeypatch.setitem(job.ENVIRONMENT, "BACKUP_DIR", URL)
    codes, outputs = test_fit_scripts.ended(script, range(2), first, victim)
    assert codes[victim] == -signal.SIGKILL and 0 not in codes, outputs
    there = {name.rpartition("/")[2] for name in s3.names(BACKUP)} - {"lease.json"}
    assert there and there <= {"tfdist-backup-even", "tfdist-backup-odd"}
    again = test_fit_scripts.run(script, 2, second)
    assert "resumed after epoch 4" in again[0] and not (first / "backup").exists()
    assert {test_fit_scripts.history(output) for output in again} == {test_fit_scripts.history(undisturbed[0])}
    assert not s3.names(BACKUP), "it is deleted when training has finished"
