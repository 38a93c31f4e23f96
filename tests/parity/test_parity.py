"""N workers compute what one device computes: every row of worker.ROWS, on every runtime, against `one_device`."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from tests.parity.worker import COMPRESSED, ROWS
from tfdist.launcher.local_job import LocalJob

pytestmark = pytest.mark.slow

# The step is the same everywhere; these rows differ in what a runtime does: statistics, uneven shares, skipped steps.
OF_RUNTIMES = [
    "momentum",
    "momentum_uneven",
    "adamw_clip_ema",
    "sgd_table",
    "momentum_added",
    "momentum_masked",
    "offset",
    "float16",
]
# name -> (workers, flags, rows)
RUNTIMES = {
    "one_device": (1, ["--strategy=one_device"], list(ROWS)),
    "mirrored": (1, ["--strategy=mirrored", "--virtual_devices=2"], [*OF_RUNTIMES, "momentum_clip_accumulation"]),
    "two_workers": (2, ["--strategy=multi_worker"], [*ROWS, *COMPRESSED]),
    "three_workers": (
        3,
        ["--strategy=multi_worker", "--communication=socket"],
        ["momentum_uneven", "momentum_clip_accumulation"],
    ),
    "two_workers_sockets": (2, ["--strategy=sockets"], OF_RUNTIMES),
    "two_workers_grpc": (2, ["--strategy=multi_worker", "--communication=ring"], OF_RUNTIMES),
    "two_workers_horovod": (2, ["--strategy=horovod"], [row for row in OF_RUNTIMES if row != "momentum"]),
}
# largest difference of a weight after 50 steps
BOUNDS = {
    "sgd": 1e-6,
    "momentum": 1e-6,
    "adamw": 1e-5,
    "float16": 1e-3,
    "offset": 5e-3,
}  # of numbers of 2000 float32 keeps 1e-4
COMPRESSED_BOUND = 3e-3  # gradients keep 8 bits


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """runtime -> row -> [arrays of every rank]"""
    found = {}

    def result(runtime):
        if runtime not in found:
            workers, flags, rows = RUNTIMES[runtime]
            out = tmp_path_factory.mktemp(runtime)
            job = LocalJob(
                [sys.executable, "-m", "tests.parity.worker", str(out), ",".join(rows), "--steps=50", *flags],
                workers,
                out / "logs",
                pin=False,
            )
            job.start()
            ended = job.wait()
            assert ended.code == 0, ended.cause
            found[runtime] = {
                row: [dict(np.load(out / f"{row}-rank-{rank}.npz")) for rank in range(workers)] for row in rows
            }
        return found[runtime]

    return result


@pytest.mark.parametrize(
    "runtime",
    [
        pytest.param(
            name,
            marks=[pytest.mark.thorough] if name in ("two_workers_grpc", "two_workers_sockets", "mirrored") else [],
        )
        for name in RUNTIMES
        if name != "one_device"
    ],
)
def test_parity(results, runtime, request):
    if "--strategy=horovod" in RUNTIMES[runtime][1]:
        request.getfixturevalue("horovod")
    problems, largest = [], {}
    for row in RUNTIMES[runtime][2]:
        reference, ranks = results("one_device")[row.removesuffix("_bf16")][0], results(runtime)[row]
        bound = COMPRESSED_BOUND if row in COMPRESSED else BOUNDS[row.partition("_")[0]]
        for name, expected in reference.items():
            difference = np.abs(ranks[0][name] - expected).max()
            largest[row] = max(largest.get(row, 0.0), difference)
            # Losses and metrics of weights that differ by up to `bound` differ by about as much.
            if not difference <= (bound if name.startswith("weight") else 10 * bound):
                problems.append(f"{row}: {name} differs by {difference:.1e}")
            problems += [
                f"{row}: {name} of rank {rank} is not that of rank 0"
                for rank, other in enumerate(ranks)
                if not np.array_equal(other[name], ranks[0][name])
            ]
    assert not problems, "\n".join(problems)
    rounded = largest.get("momentum_accumulation_bf16")
    assert rounded is None or rounded > 1e-5, "nothing was rounded"


def test_training_moved_the_weights(results):
    """Parity of runs that learn nothing would prove nothing."""
    for row in ROWS:
        losses = results("one_device")[row][0]["losses"]
        assert losses[-1] < 0.8 * losses[0], (row, losses)
