"""A mesh computes what one device computes: every row of mesh_worker.ROWS, whole weights and optimizer state, after 20
steps.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from tests.e2e.job import ENVIRONMENT
from tests.parity.mesh_worker import ROWS, job_of
from tfdist.launcher.local_job import LocalJob

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
    """names of rows -> job -> what one device makes of it."""

    def of(names):
        jobs = list(dict.fromkeys(map(job_of, names)))
        missing = [job for job in jobs if not (folder / "one" / f"{job}.npz").exists()]
        if missing:
            subprocess.run(
                [sys.executable, "-m", "tests.parity.mesh_worker", str(folder), "one", ",".join(missing)],
                check=True,
                env=ENVIRONMENT,
                timeout=400,
            )
        return {job: dict(np.load(folder / "one" / f"{job}.npz")) for job in jobs}

    return of


@pytest.fixture(scope="module")
def spread(folder):
    """(workers, names of rows) -> row -> what a mesh of as many workers makes of it."""

    def of(workers, names):
        missing = [name for name in names if not (folder / "mesh" / f"{name}.npz").exists()]
        if missing:
            job = LocalJob(
                [sys.executable, "-m", "tests.parity.mesh_worker", str(folder), "mesh", ",".join(missing)],
                workers,
                folder / f"logs-{missing[0]}",
                pin=False,
                environment=ENVIRONMENT,
            )
            job.start()
            ended = job.wait()
            assert ended.code == 0, ended.cause
        return {name: dict(np.load(folder / "mesh" / f"{name}.npz")) for name in names}

    return of


# Of each kind one; the other rows are thorough.
CORE = (
    "zero2_2_adamw",
    "zero3_2_adamw",
    "pipe2_interleaved",
    "pipe2_cut",
    "pipe2_idle",
    "pipe2_frozen",
    "zero3_idle",
    "zero0_2_subclassed",
    "zero3_2_subclassed",
    "pipe2_added_interleaved",
    "expert2",
    "model2_sequence",
    "model2_around",
    "zero3_3_adamw",
    *(f"zero{stage}_2_memory" for stage in range(4)),
)
RUNS = [
    (workers, [name for name, row in ROWS.items() if row.workers == workers and (name in CORE) is core], core)
    for core in (True, False)
    for workers in (2, 3, 4, 8)
]


@pytest.mark.parametrize(
    "workers, names",
    [
        pytest.param(
            workers,
            names,
            id=f"{workers} workers, {'core' if core else 'the others'}",
            marks=[] if core else [pytest.mark.thorough],
        )
        for workers, names, core in RUNS
        if names
    ],
)
def test_parity(workers, names, spread, reference):
    references, results = reference([*names, *CORE]), spread(workers, names)
    problems = []
    for name in (name for name in names if not name.endswith("memory")):
        expected, found = references[job_of(name)], results[name]
        assert found.keys() == expected.keys(), name
        bound = FLOAT16_BOUND if "float16" in name else BOUND
        for key, value in expected.items():
            if key in ("held", "peak") or (
                key.startswith("model/") and value.dtype.kind == "i"
            ):  # seeds are made anew in every step
                continue
            difference = (
                np.abs(found[key].astype(np.float64) - value).max() if found[key].shape == value.shape else np.inf
            )
            if not difference <= bound:
                problems.append(f"{name}: {key} differs by {difference:.1e}")
    assert not problems, "\n".join(problems)


def test_what_is_cut_and_computes_something_else_is_refused(tmp_path):
    """On all workers, with a sentence that says what."""
    command = [sys.executable, "-m", "tests.parity.mesh_worker", str(tmp_path), "refused"]
    job = LocalJob(command, 2, tmp_path / "logs", pin=False, environment=ENVIRONMENT)
    job.start()
    ended = job.wait()
    assert ended.code == 0, ended.cause
    for name, words in (
        ("gated", "--mesh=model=2 cuts layers of"),
        ("log_softmax", "its outputs differ"),
        ("head_of_some_positions", "drop --sequence_parallel"),
    ):
        sentences = [(tmp_path / f"{name}-{rank}.txt").read_text() for rank in range(2)]
        assert all(words in sentence for sentence in sentences), (name, sentences)


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_memory_is_as_the_formulas_say(workers, spread, reference):
    """zero.py's table, for AdamW (two slots) at 2 and 4 workers."""
    results = spread(workers, [f"zero{stage}_{workers}_memory" for stage in range(4)])
    whole = reference(["zero0_2_memory"])["zero0_2_memory"]["held"]
    parameters = whole[0]
    assert list(whole) == [parameters, parameters, 2 * parameters + 8]
    for stage in range(4):
        part = parameters / workers
        expected = {
            0: [parameters, parameters, 2 * parameters],
            1: [parameters, parameters, 3 * part],
            2: [parameters, part, 3 * part],
            3: [part, part, 2 * part],
        }[stage]
        np.testing.assert_allclose(
            results[f"zero{stage}_{workers}_memory"]["held"],
            expected,
            rtol=0.1,
            err_msg=f"stage {stage}, {workers} workers",
        )


@pytest.mark.thorough
def test_1f1b_needs_less_memory_than_gpipe(spread):
    """8 micro-batches, of which the first of two stages holds 8 with gpipe, and 2 with 1f1b."""
    results = spread(2, ["pipe2_gpipe_peak", "pipe2_1f1b_peak"])
    peaks = {name: int(results[f"pipe2_{name}_peak"]["peak"]) for name in ("gpipe", "1f1b")}
    print(peaks)
    assert peaks["1f1b"] < 0.6 * peaks["gpipe"]


def test_training_moved_the_weights(reference):
    """Parity of runs that learn nothing would prove nothing."""
    for name, result in reference([name for name in CORE if not name.endswith("memory")]).items():
        assert result["losses"][-1] < result["losses"][0] - 1e-3, (name, result["losses"])
