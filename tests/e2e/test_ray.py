"""A real Ray cluster of three nodes on this machine: a node is lost and comes back in mid-run, the job is signalled,
there is too little room.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.job import CLUSTERS, IDENTIFIED, batches, records, run, snapshot, start, wait_for, workers_training

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason=(
            f"Ray is not installed: pip has none for Python {sys.version_info[0]}.{sys.version_info[1]} beside this"
            " TensorFlow, or it was left out"
        ),
    ),
]
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def cluster():
    """Three nodes with a CPU each; the launchers find them through RAY_ADDRESS."""
    from ray.cluster_utils import Cluster

    handler = signal.getsignal(signal.SIGTERM)  # Ray sets its own
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")  # other tests use the memory as well
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.getcwd())  # where the actors find tfdist
        made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        try:
            for _ in range(2):
                made.add_node(**NODE)
            signal.signal(signal.SIGTERM, handler)
            yield made
        finally:
            made.shutdown()


@pytest.fixture
def launch(cluster):
    """Starts a job on the cluster; what a failed test leaves is ended, since the next one needs its room."""
    started = []

    def start_on_ray(workers: int, flags: list[str], *own: str, **environment: str) -> subprocess.Popen:
        started.append(start(workers, flags, ("--on=ray", *own), {"RAY_ADDRESS": cluster.address, **environment}))
        return started[-1]

    yield start_on_ray
    for process in started:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def paced(run_dir: Path, seconds: float):
    """Every step of a run with TFDIST_FAULTS takes this long, so that there is time for changes."""
    pace = run_dir / "faults" / "pace"
    pace.parent.mkdir(parents=True)
    pace.write_text(str(seconds))
    yield
    pace.unlink()


@pytest.mark.thorough
def test_a_node_is_lost_and_comes_back(cluster, launch, tmp_path):
    """3 -> 2 -> 3 workers, and each step sees the samples that it sees in a run of one worker."""
    flags = [*IDENTIFIED, "--steps=240", "--log_every=1", "--save_every=10", "--deterministic"]
    run(1, [*flags, f"--run_dir={tmp_path / 'one'}"])
    many = tmp_path / "many"
    with paced(many, 0.1):
        process = launch(3, [*flags, f"--run_dir={many}"], "--min_workers=2", TFDIST_FAULTS="armed")
        wait_for(lambda: workers_training(many) == 3, 200)
        cluster.remove_node(sorted(cluster.worker_nodes, key=lambda node: node.node_id)[0], allow_graceful=False)
        wait_for(lambda: workers_training(many) == 2, 200)
        cluster.add_node(**NODE)
        wait_for(lambda: workers_training(many) == 3, 200)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert [record["values"]["workers"] for record in records(many, kind="start")] == [3, 2, 3], output
    assert "from 2 to 3 workers: the job saves and is restarted" in output and "[worker 2]" in output
    assert batches(many) == batches(tmp_path / "one")
    ends = [snapshot(folder, 240) for folder in (tmp_path / "one", many)]
    for key, array in ends[0].items():
        np.testing.assert_allclose(
            array.astype("float64"), ends[1][key].astype("float64"), rtol=0, atol=2e-6, err_msg=key
        )


@pytest.mark.thorough
def test_sigterm_saves_and_ends_with_42(launch, tmp_path):
    process = launch(2, [*CLUSTERS, "--steps=1000000", f"--run_dir={tmp_path}"])
    wait_for(lambda: workers_training(tmp_path) == 2, 200)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 42 and list((tmp_path / "checkpoints").glob("step-*")), output


@pytest.mark.thorough
def test_a_mistake_keeps_its_code_and_is_not_retried(launch, tmp_path):
    output, _ = (
        process := launch(2, [*CLUSTERS, "--steps=10", "--model_args=width=3", f"--run_dir={tmp_path}"])
    ).communicate(timeout=120)
    assert process.returncode == 2 and "has no option 'width'" in output.splitlines()[-2] and "restart" not in output, (
        output
    )
    assert "has no option 'width'" in (tmp_path / "logs" / "worker-1.log").read_text()


@pytest.mark.thorough
def test_too_little_room_is_said_after_a_time(launch, tmp_path):
    output, _ = (
        process := launch(4, [*CLUSTERS, "--steps=10", f"--run_dir={tmp_path}"], "--placement_timeout=2")
    ).communicate(timeout=120)
    assert process.returncode == 5, output
    assert (
        "no room for 4 workers of 1 CPU each within --placement_timeout=2 s, since the cluster has 3 nodes (1 CPU; 1"
        " CPU; 1 CPU)"
        in output
        and "Traceback" not in output
    )
