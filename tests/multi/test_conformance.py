"""One suite over every Runtime, with real processes."""

import io
import sys

import numpy as np
import pytest

from tests.e2e.job import ENVIRONMENT, records, run, train
from tfdist.launcher.local_job import LocalJob

pytestmark = pytest.mark.slow

RUNTIMES = {
    "one_device": (1, ["--strategy=one_device"]),
    "mirrored": (1, ["--strategy=mirrored", "--virtual_devices=3"]),
    "two workers": (2, ["--strategy=multi_worker"]),
    "three workers, small packs over TCP": (
        3,
        ["--strategy=multi_worker", "--pack_mb=0.001", "--communication=socket"],
    ),
    "three workers, plain sockets": (3, ["--strategy=sockets"]),
    "three workers over gRPC": (3, ["--strategy=multi_worker", "--communication=ring"]),
    "two workers by Horovod": (2, ["--strategy=horovod"]),
    "three workers by Horovod, small packs": (
        3,
        ["--strategy=horovod", "--horovod_fusion_mb=0.001", "--horovod_cycle_ms=0"],
    ),
    "mesh of three": (3, ["--strategy=mesh"]),
    "two workers by one's own": (2, ["--strategy=examples/own_runtime.py:STAR"]),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=(
                [pytest.mark.thorough]
                if name
                in (
                    "three workers by Horovod, small packs",
                    "three workers over gRPC",
                )
                else []
            ),
        )
        for name in RUNTIMES
    ],
)
def test_conformance(name, tmp_path, request):
    workers, flags = RUNTIMES[name]
    if "--strategy=horovod" in flags:
        request.getfixturevalue("horovod")
    output = io.StringIO()
    job = LocalJob(
        [sys.executable, "-m", "tests.multi.conformance", *flags],
        workers,
        tmp_path,
        pin=False,
        environment=ENVIRONMENT,
        output=output,
    )
    job.start()
    result = job.wait()
    assert result.code == 0, f"{result.cause}\n{output.getvalue()}"
    assert output.getvalue().count("is as it must be") == workers


def test_a_runtime_of_ones_own_is_a_file_and_a_line(tmp_path):
    """It trains as one device does on the same global batches."""
    flags = [
        "--source=digits",
        "--model=mlp",
        "--model_args=widths=(16,)",
        "--global_batch=32",
        "--steps=6",
        "--log_every=1",
        "--export=none",
        "--noplot",
    ]
    run(2, [*flags, "--strategy=examples/own_runtime.py:STAR", f"--run_dir={tmp_path}/star"])
    alone = train([*flags, "--strategy=one_device", f"--run_dir={tmp_path}/alone"])
    assert alone.returncode == 0, alone.stderr
    losses = {
        name: [record["values"]["train/loss"] for record in records(tmp_path / name, kind="train")]
        for name in ("star", "alone")
    }
    # The sum over a batch is added up in two parts: a few roundings of 2^-24 a step.
    assert len(losses["star"]) == 6
    np.testing.assert_allclose(losses["star"], losses["alone"], rtol=2e-6)
