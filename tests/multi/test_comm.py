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
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tfdist.comm",
            f"--out={folder}",
            "--smallest=16",
            "--largest=1024",
            "--factor=4",
            "--repeats=2",
            *flags,
        ],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "runtime, workers, carrier",
    [
        ("multi_worker:socket", "2", "our ring"),
        *(
            pytest.param(*row, marks=pytest.mark.thorough)
            for row in (
                ("mesh", "2", "TensorFlow, gRPC"),
                ("multi_worker:ring", "2", "TensorFlow, gRPC"),
                ("horovod", "2", "Horovod, Gloo"),
                ("sockets", "2,3", "our ring"),
            )
        ),
    ],
)
def test_every_engine_runs_all_it_has(runtime, workers, carrier, tmp_path, request):
    if runtime == "horovod":
        request.getfixturevalue("horovod")
    output = measure(tmp_path, f"--workers={workers}", f"--runtimes={runtime}")
    names = set(COLLECTIVES) - MISSING.get(runtime, set())
    assert (f"{runtime} has no " in output) == (runtime in MISSING)
    for count in workers.split(","):
        stem = f"{runtime.replace(':', '-')}-{count}"
        with open(tmp_path / f"{stem}.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert {row["collective"] for row in rows} == names and {
            row["through"] for row in rows if row["collective"] == "all_reduce"
        } == {carrier}
        for name in names:
            series = [row for row in rows if row["collective"] == name]
            assert len(series) == len(SIZES) and all(
                abs(int(row["bytes"]) - size) < 16 and float(row["seconds"]) > 0
                for row, size in zip(series, SIZES, strict=True)
            )
            assert f"{name}, {runtime}, {count} members, through " in output
        assert (tmp_path / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
    if "," in workers:  # explained together
        assert f"all_reduce, {runtime}, 2 and 3 workers together" in output and output.count("as tree: ") == 2 * 3
        assert (tmp_path / f"{runtime}-models.png").exists()
