"""Horovod under its own launchers, and what only it can get wrong."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.job import ENVIRONMENT
from tfdist.launcher.local_job import LocalJob

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("horovod")]


def run_two(module: str, flags: list[str], folder: Path) -> str:
    output = io.StringIO()
    job = LocalJob(
        [sys.executable, "-m", module, *flags], 2, folder, pin=False, environment=ENVIRONMENT, output=output, grace=1.0
    )
    job.start()
    result = job.wait()
    assert result.code == 0 or "explained" in output.getvalue(), f"{result.cause}\n{output.getvalue()}"
    return output.getvalue()


def test_compression_batchnorm_and_a_rank_that_is_stuck(tmp_path):
    output = run_two(
        "tests.multi.horovod_worker",
        ["--strategy=horovod", "--horovod_compression=fp16", "--collective_timeout=10"],
        tmp_path,
    )
    assert output.count("checks passed") == 2, output
    assert "explained: PeerLostError" in output and "--collective_timeout" in output, output


@pytest.mark.thorough
def test_under_horovodrun(tmp_path):
    """--strategy=auto finds out."""
    run = Path(sys.executable).parent / "horovodrun"
    made = subprocess.run(
        [run, "-np", "2", "--gloo", sys.executable, "-m", "tests.multi.conformance"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    assert made.stdout.count("conformance: horovod rank") == 2, made.stdout


@pytest.mark.thorough
def test_horovodruns_own_elastic_mode_is_refused(tmp_path):
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho localhost:2\n")
    script.chmod(0o755)
    run = Path(sys.executable).parent / "horovodrun"
    made = subprocess.run(
        [
            run,
            "-np",
            "2",
            "--min-np",
            "1",
            "--host-discovery-script",
            script,
            "--network-interface",
            "lo",
            "--gloo",
            sys.executable,
            "-m",
            "tfdist.train",
            "--steps=1",
            "--global_batch=8",
            f"--run_dir={tmp_path}",
        ],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert made.returncode != 0 and "use `python -m tfdist.launch --elastic" in made.stdout + made.stderr, (
        made.stdout + made.stderr
    )


def test_with_the_environment_of_mpirun():
    """Open MPI's variables, as two processes of one machine get them."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.multi.conformance"],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={
                **ENVIRONMENT,
                "PMIX_NAMESPACE": f"tfdist-{os.getpid()}",
                "OMPI_COMM_WORLD_RANK": str(rank),
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
        )
        for rank in (0, 1)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    for rank, output in enumerate(outputs):
        assert f"conformance: horovod rank {rank} of 2 is as it must be" in output, output
