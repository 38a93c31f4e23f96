"""tfdist/artifacts/run_identity.py: who says which run lies in a folder, where status.json is lost or damaged."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from tfdist.artifacts.run_identity import run_of
from tfdist.artifacts.snapshot_folder import SnapshotFolder
from tfdist.artifacts.status import write_status


def snapshots(folder, **runs):
    """Writes snapshots: step_10="abc" is one of step 10, of the run abc."""
    store = SnapshotFolder(str(folder / "checkpoints"))
    for name, run_id in runs.items():
        step = int(name.removeprefix("step_"))
        store.write(step, {"train/step": np.array(step)}, {"run_id": run_id} if run_id else {})
    return store


def lose_status(folder, how):
    if how == "gone":
        (folder / "status.json").unlink(missing_ok=True)
    else:
        (folder / "status.json").write_text({"empty": "", "cut": '{"status": "runn', "other": "[]"}[how])


@pytest.mark.parametrize("how", ["gone", "empty", "cut", "other"])
def test_the_newest_snapshot_says_what_the_status_does_not(tmp_path, how):
    assert run_of(tmp_path / "nothing") == ""
    snapshots(tmp_path, step_10="old", step_20="abc")
    write_status(tmp_path, "running", "def")
    assert run_of(tmp_path) == "def", "the status goes before"
    lose_status(tmp_path, how)
    assert run_of(tmp_path) == "abc"


@pytest.mark.parametrize("damage", ["gone", "empty", "another id", "a pipe", "names none"])
def test_a_damaged_manifest_is_passed_over(tmp_path, damage):
    store = snapshots(tmp_path, step_10="abc", step_20="" if damage == "names none" else "xyz")
    file = tmp_path / "checkpoints" / "step-00000020" / "manifest.json"
    if damage == "another id":
        file.write_text(file.read_text().replace("xyz", "xyy"))
    elif damage != "names none":
        file.unlink()
        os.mkfifo(file) if damage == "a pipe" else file.write_text("") if damage == "empty" else None
    assert run_of(tmp_path) == "abc" and store.steps() == [10, 20]


def test_a_part_of_a_snapshot_says_it_where_no_machine_has_all(tmp_path):
    folder = tmp_path / "parts" / "step-00000010"
    folder.mkdir(parents=True)
    for name, content in (("00", {"run_id": "abc"}), ("01", {"run_id": 3}), ("02", [])):
        (folder / f"part-000{name}.json").write_text(json.dumps(content))
    assert run_of(tmp_path) == "abc"
