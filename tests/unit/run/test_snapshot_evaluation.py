"""What tfdist.evaluate says where there is nothing to evaluate."""

from __future__ import annotations

import numpy as np
import pytest

from tfdist.artifacts.snapshot_folder import SnapshotFolder
from tfdist.config import Config
from tfdist.control.exit_codes import CheckpointError, ConfigError
from tfdist.run import snapshot_evaluation


def test_a_folder_that_holds_no_run(tmp_path):
    with pytest.raises(ConfigError, match=r"--run_dir=.*/nowhere is not there: give the folder of a run"):
        snapshot_evaluation.main([f"--run_dir={tmp_path / 'nowhere'}"])
    with pytest.raises(ConfigError, match=r"holds no run \(no flags.txt, no checkpoints\)"):
        snapshot_evaluation.main([f"--run_dir={tmp_path}"])
    (tmp_path / "flags.txt").write_text("--steps=5\n")
    with pytest.raises(ConfigError, match="has no snapshots yet"):
        snapshot_evaluation.main([f"--run_dir={tmp_path}"])


def test_a_step_that_has_no_snapshot(tmp_path):
    (tmp_path / "flags.txt").write_text("--steps=50\n--global_batch=8\n")
    store = SnapshotFolder(str(tmp_path / "checkpoints"))
    for step in (10, 20):
        store.write(step, {"train/step": np.array(step)}, {})
    with pytest.raises(
        CheckpointError, match=r"--at_step=7: .*/checkpoints has no snapshot of that step; it has 10, 20\.$"
    ):
        snapshot_evaluation.main([f"--run_dir={tmp_path}", "--at_step=7"])


def test_one_step_and_each_new_one_are_two_wishes():
    with pytest.raises(ConfigError, match="--at_step=4 evaluates one snapshot, --follow each new one"):
        snapshot_evaluation.main(["--run_dir=x", "--follow", "--at_step=4"])


def test_where_no_flags_are_stored_nobody_asks_how_long_to_train(tmp_path):
    config = Config().replace(run_dir=str(tmp_path), source="digits", model="mlp", global_batch=8)
    assert snapshot_evaluation.run_configuration(config, [], tmp_path).run.steps == 1
