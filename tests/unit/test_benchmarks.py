"""The benchmarks against peers: what makes their figures comparable, and what they say where they cannot run."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path("scripts").resolve()


@pytest.fixture
def peers(monkeypatch):
    """Imports a module of scripts/peers."""
    monkeypatch.syspath_prepend(SCRIPTS / "peers")
    return importlib.import_module


@pytest.mark.parametrize("name", ["cnn", "resnet", "transformer10m"])
def test_the_models_come_to_what_the_formulas_say(peers, name):
    import keras

    models, workload = peers("keras_models"), peers("workloads").WORKLOADS[name]
    model = models.build(workload, keras)
    assert models.count(model) == workload.parameters
    assert models.forward_flops(model, 2) == 2 * workload.flops


def test_workers_of_any_number_share_the_same_global_batches(peers):
    import numpy as np

    workloads = peers("workloads")
    workload = workloads.WORKLOADS["cnn"]
    alone = workloads.batches(workload, workload.batch, 0, 1)
    halves = [workloads.batches(workload, workload.batch // 2, rank, 2) for rank in range(2)]
    for part in range(2):
        assert np.array_equal(alone[part], np.concatenate([half[part] for half in halves], axis=1))


def cell(name, workload, **values):
    settings = {
        "workload": workload.name,
        "engine": name,
        "mode": "1",
        "round": 0,
        "world": 1,
        "batch": workload.batch,
        "steps": workload.steps,
        "windows": 5,
    }
    return {
        "settings": settings,
        "load": 0.0,
        "steps_per_s": [1.0, 2.0, 4.0],
        "startup_s": 3.0,
        "peak_mb": 100.0,
        "losses": [2.0],
        "parameters": workload.parameters,
        "flops": workload.flops,
        "versions": "",
        **values,
    }


@pytest.mark.parametrize(
    "values, words",
    [
        ({"parameters": 1}, "1 parameters instead of"),
        ({"flops": 1}, "1 flops instead of"),
        ({"losses": [2.1]}, "mean loss of its first window"),
        ({"error": "it died"}, "it died"),
    ],
)
def test_a_row_of_other_arithmetic_is_refused(peers, tmp_path, values, words):
    workload = peers("workloads").WORKLOADS["cnn"]
    (tmp_path / "cells").mkdir()
    for name, changes in (("Keras fit", {}), ("Horovod", {}), ("PyTorch DDP", values)):
        (tmp_path / "cells" / f"{name}.json").write_text(json.dumps(cell(name, workload, **changes)))
    text = peers("report").write(tmp_path)
    assert "| Keras fit | 2 (1 to 4) |" in text and "| PyTorch DDP |" not in text
    assert words in text.partition("no row: cnn, PyTorch DDP, 1 worker")[2]


def test_efficiency_is_that_against_the_same_engine_alone(peers):
    workload, report = peers("workloads").WORKLOADS["cnn"], peers("report")
    alone = cell("tfdist one_device", workload, steps_per_s=[2.0])
    both = cell("tfdist multi_worker", workload, steps_per_s=[1.0])
    both["settings"] |= {"mode": "2", "world": 2}
    rows = report.summarize([alone, both])
    assert rows["tfdist multi_worker"]["2"]["efficiency"] == 0.5
    assert rows["tfdist multi_worker"]["2"]["communication"] == 0.5


def test_what_a_snapshot_costs_is_seen_whenever_it_is_written(monkeypatch, peers, tmp_path):
    """Two at once, 0.5 s; two in the background, 0.2 s of which are in the window after the next; one that is noted
    before its window's end.
    """
    import numpy as np

    monkeypatch.syspath_prepend(SCRIPTS)
    durations = np.ones(24)
    for window, seconds in ((5, 0.5), (9, 0.5), (13, 0.3), (14, 0.2), (17, 0.3), (18, 0.2), (20, 0.5)):
        durations[window - 1] += seconds
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "newest.pt").write_bytes(bytes(2_000_000))
    found = peers("bench_peers").snapshots(tmp_path, list(np.cumsum(durations)))
    assert found["lost_s"] == pytest.approx([0.5] * 5) and found["snapshot_mb"] == 2.0


def test_a_job_goes_on_from_the_snapshot_of_its_own_kind(monkeypatch, peers):
    monkeypatch.syspath_prepend(SCRIPTS)
    script, engines, workload = peers("bench_peers"), peers("engines"), peers("workloads").WORKLOADS["transformer50m"]
    saved, resumed = (
        script.make_plan(workload, engines.ENGINES["tfdist sockets"], mode, 0, False) for mode in ("2c", "2r")
    )
    flags = [engines._tfdist_flags(plan, Path(plan.name)) for plan in (saved, resumed)]
    assert resumed.origin == saved.name and resumed.saved == 24 and resumed.world == 2
    assert [next(flag for flag in each if flag.startswith("--steps=")) for each in flags] == [
        "--steps=24",
        "--steps=27",
    ]
    assert f"--run_dir={saved.name}/run" in flags[1] and "--save_every=4" in flags[0]


def test_bench_gpu_says_where_it_can_run(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPTS / "bench_gpu.py", f"--out={tmp_path / 'out'}"],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and not (tmp_path / "out").exists()
    assert (
        done.stderr.strip()
        == "bench_gpu: this machine shows no NVIDIA GPU (nvidia-smi is missing or lists none): run it on a machine that"
        " has one."
    )


def test_bench_peers_names_a_wrong_choice(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            (
                "import argparse, sys; sys.path.insert(0, 'scripts'); import bench_peers;"
                " bench_peers.selection(argparse.Namespace(only='cnn,tensorfow', quick=True, rounds=1, modes='1'))"
            ),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and done.stderr.startswith(
        "bench_peers: --only=cnn,tensorfow: 'tensorfow' is in no name: use parts of transformer10m, "
    )
