"""tfdist.comm over every engine, in real processes. What it measures is not judged here."""

import csv
import subprocess
import sys

import pytest

from tests.e2e.job import ENVIRONMENT
from tfdist.comm import COLLECTIVES

pytestmark = pytest.mark.slow

SIZES = [16, 64, 256, 1024]  # bytes
MISSING = {"sockets": {"reduce_scatter", "all_to_all"}}


def measure(folder, *flags):
    done = subprocess.run([sys.executable, "-m", "tfdist.comm", f"--out={folder}", "--smallest=16", "--largest=1024", "--factor=4", "--repeats=2", *flags], env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("runtime, carrier", [("multi_worker", "our TCP ring"), ("multi_worker:ring", "TensorFlow, gRPC"), ("sockets", "our TCP ring"), ("horovod", "Horovod, Gloo"), ("mesh", "TensorFlow, gRPC")])
def test_every_engine_runs_all_it_has(runtime, carrier, tmp_path, request):
    if runtime == "horovod":
        request.getfixturevalue("horovod")
    output = measure(tmp_path, "--workers=2", f"--runtimes={runtime}")
    stem = f"{runtime.replace(':', '-')}-2"
    with open(tmp_path / f"{stem}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["collective"] for row in rows} == set(COLLECTIVES) - MISSING.get(runtime, set())
    assert (f"{runtime} has no " in output) == (runtime in MISSING)
    for name in {row["collective"] for row in rows}:
        series = [row for row in rows if row["collective"] == name]
        assert [int(row["bytes"]) for row in series] == SIZES and all(float(row["seconds"]) > 0 for row in series)
        assert f"\n{name}, {runtime}, 2 members, through " in output.replace("\r", "").replace("worker 0 | ", "")
    assert {row["through"] for row in rows if row["collective"] == "all_reduce"} == {carrier}
    assert (tmp_path / f"{stem}.png").read_bytes().startswith(b"\x89PNG")


def test_several_numbers_of_workers_are_explained_together(tmp_path):
    output = measure(tmp_path, "--workers=2,3", "--strategy=multi_worker", "--collectives=all_reduce,broadcast")
    assert "all_reduce, multi_worker, 2 and 3 workers together" in output and output.count("as halving_doubling") == 3
    assert (tmp_path / "multi_worker-models.png").exists()
