"""A run of two workers that is killed and goes on, seen from outside: TensorBoard, CSV, MLflow, Prometheus, a trace."""

import csv
import json
import re
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.job import CLUSTERS, free_ports, records, start, wait_for

pytestmark = pytest.mark.slow
DASHBOARD = Path("scripts/grafana_dashboard.json")


def scraped(port):
    """{(name, rank): value} of an endpoint, read by Prometheus' own parser; {} if there is none at the moment."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    except OSError:
        return {}
    return {
        (sample.name, sample.labels.get("rank")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.thorough
def test_a_killed_run_is_one_run_in_every_tracker(tmp_path, monkeypatch):
    pytest.importorskip("prometheus_client")
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    port = free_ports(2)
    process = start(
        2,
        [
            *CLUSTERS,
            "--steps=60",
            "--log_every=5",
            "--save_every=20",
            "--eval_every=20",
            "--steps_per_loop=1",
            f"--run_dir={tmp_path}",
            "--progress=none",
            "--trackers=tensorboard,csv,mlflow",
            "--histograms_every=20",
            f"--prometheus_port={port}",
            "--profile_steps=51:53",
            "--profile_ranks=all",
        ],
        ("--max_restarts=1",),
        {"TFDIST_FAULTS": "0:0:slow,0:38:kill"},
    )
    seen = {}

    def both_endpoints():
        for rank in range(2):
            found = scraped(port + rank)
            if (
                found.get(("tfdist_step", str(rank)), 0) >= 10
            ):  # all of step 5 has been told; events of a step come one by one
                seen[rank] = found
        assert process.poll() is None or len(seen) == 2, process.stdout.read()
        return len(seen) == 2

    try:
        wait_for(both_endpoints)
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, output
    for rank in range(2):
        assert (
            seen[rank]["tfdist_train_loss", str(rank)] > 0 and seen[rank]["tfdist_section_seconds_total", str(rank)] > 0
        )
    shown = {
        name
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for target in panel["targets"]
        for name in re.findall(r"(?:tfdist|process)_\w+", target["expr"])
    }
    assert len(shown) > 10 and shown - {name for name, _ in seen[0]} <= {"tfdist_eval_loss"}  # which comes later

    # Killed at step 38 after telling of step 35, gone on from 20: steps 25 to 35 were told twice.
    assert [record["step"] for record in records(tmp_path, kind="start")] == [0, 20]
    steps = [record["step"] for record in records(tmp_path, kind="train")]
    assert steps == [*range(5, 40, 5), *range(25, 65, 5)]
    once = {record["step"]: record["values"]["train/loss"] for record in records(tmp_path, kind="train")}
    evaluations = {record["step"]: record["values"]["eval/loss"] for record in records(tmp_path, kind="eval")}
    assert list(evaluations) == [20, 40, 60]
    for name, expected, found in [
        *(("TensorBoard", *pair) for pair in zip((once, evaluations), tensorboard(tmp_path), strict=True)),
        *(
            ("CSV", *pair)
            for pair in zip(
                (once, evaluations),
                (table(tmp_path / "metrics.csv", "train/loss"), table(tmp_path / "evaluations.csv", "eval/loss")),
                strict=True,
            )
        ),
        *(("MLflow", *pair) for pair in zip((once, evaluations), mlflow_points(tmp_path), strict=True)),
    ]:
        assert [step for step, _ in found] == sorted(expected), name
        assert dict(found) == pytest.approx(expected, rel=1e-5), name

    for folder in ("tensorboard", "tensorboard/rank-1"):
        (trace,) = (tmp_path / folder / "plugins" / "profile").glob("*/*.xplane.pb")
        assert b"train" in trace.read_bytes()
    assert [record["values"]["trace/first_step"] for record in records(tmp_path, rank=1, kind="trace")] == [51]


def tensorboard(run_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    assert (
        "weights/logits/kernel" in found.Tags()["tensors"] and "_hparams_/session_end_info" in found.Tags()["tensors"]
    )
    return [[(scalar.step, scalar.value) for scalar in found.Scalars(name)] for name in ("train/loss", "eval/loss")]


def table(path, name):
    with open(path, newline="") as file:
        return [(int(row["step"]), float(row[name])) for row in csv.DictReader(file)]


def mlflow_points(run_dir):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run_dir / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("tfdist").experiment_id])
    assert found.info.status == "FINISHED" and found.data.params["model"] == "mlp"
    return [
        [(point.step, point.value) for point in client.get_metric_history(found.info.run_id, name)]
        for name in ("train/loss", "eval/loss")
    ]
