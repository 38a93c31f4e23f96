"""What a run holds must not grow with its steps; and what ends a wait that does not end by itself."""

import pytest

from scripts.bench_leaks import RUNTIMES
from scripts.bench_leaks import run as run_measured
from tests.e2e.job import TRAINED, start

pytestmark = pytest.mark.slow

SHORT = ("mirrored, 2 replicas", "multi_worker, TensorFlow's ring")  # whose collectives all are TensorFlow's
STUCK = {
    "TensorFlow's ring": ["--strategy=multi_worker", "--communication=ring"],
    "our ring": ["--strategy=multi_worker"],
    "sockets": ["--strategy=sockets"],
    "mesh": ["--strategy=mesh"],
    "horovod": ["--strategy=horovod"],
}


def check_that_it_levels_off(name, steps, tmp_path):
    found = run_measured(name, steps, tmp_path / "run")
    early, late = found[steps // 5], found[steps]
    assert late["threads"] <= early["threads"] + 10, (early, late)  # pools grow to their sizes
    assert late["descriptors"] <= early["descriptors"] + 4, (early, late)
    assert late["resident_mib"] <= early["resident_mib"] + 100, (
        early,
        late,
    )  # the allocator keeps what the first snapshots took: bench_leaks.py


@pytest.mark.thorough
@pytest.mark.parametrize("name", SHORT)
def test_nothing_grows_in_1000_steps(name, tmp_path):
    check_that_it_levels_off(name, 1000, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("name", RUNTIMES)
def test_nothing_grows_in_5000_steps(name, tmp_path, request):
    if name == "horovod":
        request.getfixturevalue("horovod")
    check_that_it_levels_off(name, 5000, tmp_path)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "TensorFlow's ring" else pytest.mark.thorough) for name in STUCK]
)
def test_a_peer_stuck_in_python_is_noticed_by_the_collective_time_out(name, tmp_path, request):
    """Its heartbeats go on: TensorFlow's threads and ours do not need Python's main thread."""
    if name == "horovod":
        request.getfixturevalue("horovod")
    process = start(
        2,
        [
            *TRAINED,
            *STUCK[name],
            "--steps=100000",
            "--steps_per_loop=5",
            "--collective_timeout=3",
            "--progress=none",
            f"--run_dir={tmp_path}",
        ],
        ("--grace=1",),
        {"TFDIST_FAULTS": "1:20:stuck"},
    )
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 6, output
    assert "--collective_timeout" in output and "start all workers again" in output, output
