"""A mesh computes what one device computes: every row of mesh_worker.ROWS, whole weights and optimizer state, after 20 steps."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from tests.e2e.job import ENVIRONMENT
from tests.parity.mesh_worker import JOBS, ROWS, job_of
from tfdist.control.launcher import LocalJob

pytestmark = pytest.mark.slow

BOUND = 1e-5
FLOAT16_BOUND = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mesh")
    for kind in ("one", "mesh"):
        (folder / kind).mkdir()
    return folder


@pytest.fixture(scope="module")
def reference(folder):
    """job -> what one device made of it."""
    subprocess.run([sys.executable, "-m", "tests.parity.mesh_worker", str(folder), "one"], check=True, env=ENVIRONMENT, timeout=400)
    return {name: dict(np.load(folder / "one" / f"{name}.npz")) for name in JOBS}


@pytest.mark.parametrize("workers", sorted({row.workers for row in ROWS.values()}))
def test_parity(workers, folder, reference):
    job = LocalJob([sys.executable, "-m", "tests.parity.mesh_worker", str(folder), "mesh"], workers, folder / f"logs-{workers}", pin=False, environment=ENVIRONMENT)
    job.start()
    ended = job.wait()
    assert ended.code == 0, ended.cause
    problems = []
    for name in (name for name, row in ROWS.items() if row.workers == workers and not name.endswith("memory")):
        expected, found = reference[job_of(name)], dict(np.load(folder / "mesh" / f"{name}.npz"))
        assert found.keys() == expected.keys(), name
        bound = FLOAT16_BOUND if "float16" in name else BOUND
        for key, value in expected.items():
            if key in ("held", "peak") or (key.startswith("model/") and value.dtype.kind == "i"):  # seeds are made anew in every step
                continue
            difference = np.abs(found[key].astype(np.float64) - value).max() if found[key].shape == value.shape else np.inf
            if not difference <= bound:
                problems.append(f"{name}: {key} differs by {difference:.1e}")
    assert not problems, "\n".join(problems)


def test_memory_is_as_the_formulas_say(folder, reference):
    """zero.py's table, for AdamW (two slots) at 2 and 4 workers; `reference` and the parity tests have made the files."""
    whole = np.load(folder / "one" / f"{job_of('zero0_2_memory')}.npz")["held"]
    parameters = whole[0]
    assert list(whole) == [parameters, parameters, 2 * parameters + 8]
    for workers in (2, 4):
        for stage in range(4):
            part = parameters / workers
            expected = {0: [parameters, parameters, 2 * parameters], 1: [parameters, parameters, 3 * part],
                        2: [parameters, part, 3 * part], 3: [part, part, 2 * part]}[stage]
            held = np.load(folder / "mesh" / f"zero{stage}_{workers}_memory.npz")["held"]
            np.testing.assert_allclose(held, expected, rtol=0.1, err_msg=f"stage {stage}, {workers} workers")


def test_1f1b_needs_less_memory_than_gpipe(folder, reference):
    """8 micro-batches, of which the first of two stages holds 8 with gpipe, and 2 with 1f1b."""
    peaks = {name: int(np.load(folder / "mesh" / f"pipe2_{name}_peak.npz")["peak"]) for name in ("gpipe", "1f1b")}
    print(peaks)
    assert peaks["1f1b"] < 0.6 * peaks["gpipe"]


def test_training_moved_the_weights(reference):
    """Parity of runs that learn nothing would prove nothing."""
    for name, result in reference.items():
        assert result["losses"][-1] < result["losses"][0] - 1e-3, (name, result["losses"])
