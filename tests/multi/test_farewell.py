"""The end of a run: in whatever order its workers come to it, all end with 0, and TensorFlow has nothing to report."""

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.job import ENVIRONMENT
from tfdist.launcher.local_job import LocalJob

pytestmark = pytest.mark.slow

REPORTED = re.compile(
    r"^(?!.*(cuda_platform|cudart_stub))[EF]\d{4} |tasks have crashed|coordination|Traceback", re.MULTILINE
)


@pytest.mark.parametrize("late", [0, 2])
def test_nobody_leaves_while_another_needs_it(late, tmp_path):
    """The heartbeat, of a second here, would find a chief that has left after its last collective."""
    flags = ["--strategy=multi_worker", "--heartbeat_timeout=2"]
    job = LocalJob(
        [sys.executable, "-m", "tests.multi.farewell", str(late), "4", *flags],
        3,
        tmp_path,
        pin=False,
        environment=ENVIRONMENT,
        output=io.StringIO(),
    )
    job.start()
    result = job.wait()
    logs = [(tmp_path / f"worker-{rank}.log").read_text() for rank in range(3)]
    assert result.code == 0 and set(result.exit_codes.values()) == {0}, logs
    assert not any(REPORTED.search(log) for log in logs), logs
    assert all(f"rank {rank} left" in log for rank, log in enumerate(logs)), logs


@pytest.mark.thorough
def test_short_runs_end_in_order():
    """scripts/short_runs.py with --runs=300 is the long form."""
    result = subprocess.run(
        [sys.executable, Path(__file__).parents[2] / "scripts" / "short_runs.py", "--runs=4"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout + result.stderr
