"""Runs on a mesh that are resumed on other meshes: the snapshots know nothing of the mesh that wrote them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.e2e.job import records, run, snapshot

pytestmark = pytest.mark.slow

FLAGS = ["--source=text", "--source_args=max_bytes=200000", "--sequence_length=16", "--model=transformer", "--model_args=size=tiny", "--objective=next_token", "--global_batch=12",
         "--learning_rate=0.01", "--optimizer=momentum", "--clip_norm=1.0", "--log_every=1", "--eval_every=-1", "--export=none", "--noplot", "--trackers=none", "--save_minutes=0", "--progress=none"]
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
