"""Runs on a mesh that are resumed on other meshes: the snapshots know nothing of the mesh that wrote them."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.e2e.job import ENVIRONMENT, records, run, snapshot, start

pytestmark = pytest.mark.slow

FLAGS = ["--source=text", "--source_args=max_bytes=200000", "--sequence_length=16", "--model=transformer", "--model_args=size=tiny", "--objective=next_token", "--global_batch=12",
         "--learning_rate=0.01", "--optimizer=momentum", "--clip_norm=1.0", "--log_every=1", "--eval_every=-1", "--export=none", "--noplot", "--trackers=none", "--save_minutes=0", "--progress=none"]
WIDTHS, LIMIT_MB = "(2048,2048,2048,2048,2048,2048)", 900
STEPS = 4
CHAIN = [(2, ["--strategy=mesh", "--zero=3"]), (1, []), (3, ["--strategy=mesh", "--zero=1"]), (2, ["--strategy=mesh", "--mesh=model=2"]),
         (4, ["--strategy=mesh", "--mesh=data=2,model=2", "--zero=2"]), (2, ["--strategy=multi_worker"])]


def test_saved_on_one_mesh_and_resumed_on_another(tmp_path):
    """Five changes of mesh, against one device that did all the steps."""
    end = STEPS * len(CHAIN)
    run(1, [*FLAGS, f"--steps={end}", f"--run_dir={tmp_path / 'one'}"])
    for number, (workers, flags) in enumerate(CHAIN, 1):
        last = ["--export=keras"] if flags == ["--strategy=mesh", "--zero=3"] else []
        run(workers, [*FLAGS, f"--steps={STEPS * number}", f"--run_dir={tmp_path / 'many'}", *flags, *last])
    losses = [{record["step"]: record["values"]["train/loss"] for record in records(tmp_path / name, kind="train")} for name in ("one", "many")]
    assert sorted(losses[1]) == list(range(1, end + 1))
    for step in losses[0]:
        assert losses[1][step] == pytest.approx(losses[0][step], abs=1e-5), step
    one, many = snapshot(tmp_path / "one", end), snapshot(tmp_path / "many", end)
    assert one.keys() == many.keys()
    for key, array in one.items():
        np.testing.assert_allclose(many[key].astype("float64"), array.astype("float64"), rtol=0, atol=1e-5, err_msg=key)
    assert (tmp_path / "many" / "export" / "model.keras").stat().st_size > 0  # written by a mesh on which no worker holds the whole model


def test_killed_while_it_writes_its_part(tmp_path):
    """Ranks 2 and 0, each in another save; then the run ends where an undisturbed one ends, bit for bit."""
    flags = [*FLAGS, "--strategy=mesh", "--zero=3", "--mesh=data=3", "--steps=12", "--save_every=3", "--keep=9", "--deterministic"]
    run(3, [*flags, f"--run_dir={tmp_path / 'one'}"])
    process = start(3, [*flags, f"--run_dir={tmp_path / 'two'}"], ("--max_restarts=3",), {"TFDIST_FAULTS": "2:6:kill_save,0:9:kill_save"})
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert "kill_save at step 6" in output and "kill_save at step 9" in output
    attempts = [record["values"]["message"] for record in records(tmp_path / "two", kind="restore")]
    assert ["step-00000003" in attempts[0], "step-00000006" in attempts[1]] == [True, True], attempts  # not the one that lacks a part
    folder = tmp_path / "two" / "checkpoints"
    assert sorted(path.name for path in folder.glob("step-*")) == [f"step-{step:08d}" for step in (3, 6, 9, 12)] and not list(folder.glob(".writing*"))
    manifest = json.loads((folder / "step-00000012" / "manifest.json").read_text())
    assert sum("data" in name for name in manifest["files"]) == 3  # a part from every rank
    one, two = snapshot(tmp_path / "one", 12), snapshot(tmp_path / "two", 12)
    assert one.keys() == two.keys() and all(one[key].tobytes() == two[key].tobytes() for key in one)


def limited(workers, flags, limit_mb):
    """A job whose processes each get `limit_mb` of memory of their own (RLIMIT_DATA), threads' stacks of 1 MB included."""
    script = f"ulimit -d {limit_mb * 1024}; ulimit -s 1024; exec \"$@\""
    command = ["bash", "-c", script, "bash", sys.executable, "-m", "tfdist.launch", f"--workers={workers}", "--", *flags]
    done = subprocess.run(command, env={**ENVIRONMENT, "MALLOC_ARENA_MAX": "1"}, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout + done.stderr


def test_a_model_that_one_worker_cannot_hold(tmp_path):
    """21 million parameters with AdamW need 16 bytes each on one worker, and 4 with ZeRO-3 on four."""
    flags = ["--source=digits", "--model=mlp", f"--model_args=widths={WIDTHS}", "--optimizer=adamw", "--global_batch=16", "--steps=2", "--eval_every=-1", "--export=none", "--noplot", "--trackers=none", "--progress=none"]
    code, output = limited(1, [*flags, f"--run_dir={tmp_path / 'one'}"], LIMIT_MB)
    assert code == 12 and "does not fit" in output and "ulimit -d" in output and "--strategy=mesh --zero=3 on at least" in output, output
    code, output = limited(4, [*flags, "--strategy=mesh", f"--run_dir={tmp_path / 'copies'}"], LIMIT_MB)
    assert code == 12 and "--zero=0" in output and "use --zero=" in output, output
    code, output = limited(4, [*flags, "--strategy=mesh", "--zero=3", f"--run_dir={tmp_path / 'shards'}"], LIMIT_MB)
    assert code == 0 and [path.name for path in (tmp_path / "shards" / "checkpoints").glob("step-*")] == ["step-00000002"], output
    code, output = limited(4, [*flags, "--strategy=mesh", "--zero=3", "--steps=3", f"--run_dir={tmp_path / 'shards'}"], LIMIT_MB)
    assert code == 0 and "resumed from" in output, output
