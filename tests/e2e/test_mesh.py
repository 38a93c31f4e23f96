"""Runs on a mesh that are resumed on other meshes: the snapshots know nothing of the mesh that wrote them."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.e2e.job import ENVIRONMENT, TRAINED, records, run, snapshot, start, train

pytestmark = pytest.mark.slow

FLAGS = [
    "--source=text",
    "--source_args=max_bytes=200000",
    "--sequence_length=16",
    "--model=transformer",
    "--model_args=size=tiny,experts=4",
    "--objective=next_token",
    "--global_batch=12",
    "--learning_rate=0.01",
    "--optimizer=momentum",
    "--clip_norm=1.0",
    "--log_every=1",
    "--eval_every=-1",
    "--export=none",
    "--noplot",
    "--trackers=none",
    "--phase_every=0",
    "--save_minutes=0",
    "--progress=none",
]
WIDTHS, LIMIT_MB = "(2048,2048,2048,2048,2048,2048)", 900
STEPS = 4
ONE_LAYER = "--model_args=layers=1,width=32,heads=2,experts=4"
CHAIN = [
    (2, ["--strategy=mesh", "--mesh=expert=2", "--zero=3"]),
    (1, []),
    (3, ["--strategy=mesh", "--zero=1"]),
    (2, ["--strategy=mesh", "--mesh=model=2"]),
    (4, ["--strategy=mesh", "--mesh=data=2,model=2", "--zero=2"]),
    (2, ["--strategy=multi_worker"]),
]


@pytest.mark.parametrize(
    "chain, more",
    [
        pytest.param([CHAIN[0], CHAIN[1], CHAIN[3]], [ONE_LAYER], id="two changes"),
        pytest.param(CHAIN, [], id="five changes", marks=pytest.mark.thorough),
    ],
)
def test_saved_on_one_mesh_and_resumed_on_another(chain, more, tmp_path):
    """Against one device that did all the steps. The experts of the model are spread on the first mesh."""
    end, common = STEPS * len(chain), [*FLAGS, *more]
    assert train([*common, f"--steps={end}", f"--run_dir={tmp_path / 'one'}"]).returncode == 0
    for number, (workers, flags) in enumerate(chain, 1):
        last = ["--export=keras"] if number == 1 else []
        run(workers, [*common, f"--steps={STEPS * number}", f"--run_dir={tmp_path / 'many'}", *flags, *last])
    losses = [
        {record["step"]: record["values"]["train/loss"] for record in records(tmp_path / name, kind="train")}
        for name in ("one", "many")
    ]
    assert sorted(losses[1]) == list(range(1, end + 1))
    for step in losses[0]:
        assert losses[1][step] == pytest.approx(losses[0][step], abs=1e-5), step
    parameters = [
        {record["values"]["parameters"] for record in records(tmp_path / name, kind="start")}
        for name in ("one", "many")
    ]
    assert parameters[1] == parameters[0] and len(parameters[0]) == 1  # of the whole model on each mesh
    dropped = [record["values"]["train/dropped_fraction"] for record in records(tmp_path / "many", kind="train")]
    assert min(dropped) >= 0 and 0 < max(dropped) < 0.5
    one, many = snapshot(tmp_path / "one", end), snapshot(tmp_path / "many", end)
    assert one.keys() == many.keys()
    for key, array in one.items():
        np.testing.assert_allclose(many[key].astype("float64"), array.astype("float64"), rtol=0, atol=1e-5, err_msg=key)
    assert (
        tmp_path / "many" / "export" / "model.keras"
    ).stat().st_size > 0  # written by a mesh on which no worker holds the whole model


def test_a_pipeline_that_one_device_goes_on_with(tmp_path):
    """By the command: what a session does with the state of a run, it does on a stage that holds only some of it, too.
    The first stage has nothing to train in the last case of parity/test_mesh_parity; here it has."""
    common = [*FLAGS, "--model_args=layers=2,width=32,heads=2", "--save_every=2"]
    stages = ["--strategy=mesh", "--mesh=pipe=2", "--accumulation=2", "--steps=4"]
    run(2, [*common, f"--run_dir={tmp_path / 'many'}", *stages])
    for folder in ("one", "many"):
        ended = train([*common, "--steps=6", f"--run_dir={tmp_path / folder}"])
        assert ended.returncode == 0, ended.stderr
    (restored,) = records(tmp_path / "many", kind="restore")
    assert restored["step"] == 4
    one, many = snapshot(tmp_path / "one", 6), snapshot(tmp_path / "many", 6)
    assert one.keys() == many.keys()
    for key, array in one.items():
        np.testing.assert_allclose(many[key].astype("float64"), array.astype("float64"), rtol=0, atol=1e-5, err_msg=key)


@pytest.mark.parametrize(
    "workers, flags, words",
    [
        (2, ["--strategy=mesh", "--zero=3", "--model_args=kind=int32"], "rank 1 differ from the chief's at step 4"),
        (
            1,
            ["--strategy=mirrored", "--virtual_devices=2", "--model_args=kind=float32"],
            "replica 1 differ from those of the first at step 4",
        ),
    ],
)
def test_replicas_that_drift_apart_are_noticed(workers, flags, words, tmp_path):
    output = run(
        workers,
        [*TRAINED, "--model=tests.e2e.faults:keeping", "--steps=4", f"--run_dir={tmp_path}", *flags],
        code=8,
    )
    assert words in output and "keeps/kept)" in output, output


@pytest.mark.thorough
def test_killed_while_it_writes_its_part(tmp_path):
    """Then the run goes on from the snapshot before, and ends where an undisturbed one ends, bit for bit."""
    flags = [*FLAGS, "--strategy=mesh", "--zero=3", "--steps=6", "--save_every=2", "--keep=9", "--deterministic"]
    run(2, [*flags, f"--run_dir={tmp_path / 'one'}"])
    process = start(
        2, [*flags, f"--run_dir={tmp_path / 'two'}"], ("--max_restarts=1",), {"TFDIST_FAULTS": "1:4:kill_save"}
    )
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0 and "kill_save at step 4" in output, output
    (restored,) = [record["values"]["message"] for record in records(tmp_path / "two", kind="restore")]
    assert "step-00000002: step 2" in restored, restored  # not the one that lacks a part
    folder = tmp_path / "two" / "checkpoints"
    assert sorted(path.name for path in folder.glob("step-*")) == [
        f"step-{step:08d}" for step in (2, 4, 6)
    ] and not list(folder.glob(".writing*"))
    manifest = json.loads((folder / "step-00000006" / "manifest.json").read_text())
    assert sum("data" in name for name in manifest["files"]) == 2  # a part from every rank
    one, two = snapshot(tmp_path / "one", 6), snapshot(tmp_path / "two", 6)
    assert one.keys() == two.keys() and all(one[key].tobytes() == two[key].tobytes() for key in one)


@pytest.mark.thorough
def test_a_model_that_one_worker_cannot_hold(tmp_path):
    """63 million parameters with AdamW and a moving average need 20 bytes each on every worker, or 5 with ZeRO-3 on
    four; each process may have 1.5 GB of its own (RLIMIT_DATA), of which TensorFlow takes 0.5, stacks of threads
    included."""
    flags = [
        "--source=digits",
        "--model=mlp",
        f"--model_args=widths=({'2048,' * 16})",
        "--optimizer=adamw",
        "--ema=0.9",
        "--global_batch=16",
        "--steps=1",
        "--eval_every=-1",
        "--export=none",
        "--noplot",
        "--trackers=none",
        "--progress=none",
        "--strategy=mesh",
    ]
    limits = 'ulimit -d 1450000; ulimit -s 1024; exec "$@"'
    environment = {
        **ENVIRONMENT,
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
    }  # what is set free goes back at once
    for zero, code in ((0, 12), (3, 0)):
        command = [
            sys.executable,
            "-m",
            "tfdist.launch",
            "--workers=4",
            "--",
            *flags,
            f"--zero={zero}",
            f"--run_dir={tmp_path / str(zero)}",
        ]
        done = subprocess.run(
            ["bash", "-c", limits, "bash", *command], env=environment, capture_output=True, text=True, timeout=300
        )
        output = done.stdout + done.stderr
        assert done.returncode == code, output
        if code:
            assert (
                "does not fit" in output
                and "63,0" in output
                and "--zero=0" in output
                and "RLIMIT_DATA (ulimit -d) gives 1.48 GB" in output
                and "use --zero=1, with which" in output
            ), output
    assert [path.name for path in (tmp_path / "3" / "checkpoints").glob("step-*")] == ["step-00000001"], output
