"""The examples, by the commands that stand in them."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.job import ENVIRONMENT
from tests.marks import thorough_but

EXAMPLES = Path("examples").resolve()
QUICK = ["--export=none", "--noplot", "--trackers=none", "--eval_samples=400"]
# What makes a job small, and what its output says at the end, with the least value.
SMALL = {
    "fit_cnn.py": [],
    "custom_loop.py": [],
    "own_model.py": QUICK,
    "own_runtime.py": QUICK,
    "language_model.py": ["5"],
    "images_tfrecord.py": [*QUICK, "--epochs=1"],
    "finetune_kerashub.py": [*QUICK, "--steps=10"],
    "parameter_server.sh": [*QUICK, "--steps=60", "--eval_every=-1"],
    "zero3.sh": [*QUICK, "--steps=6", "--eval_every=-1"],
}
REACHED = {
    "fit_cnn.py": {"validation accuracy": 0.92},
    "custom_loop.py": {"epoch 6: accuracy": 0.95},
    "own_model.py": {"eval/accuracy": 0.98},
    "own_runtime.py": {"eval/accuracy": 0.9},
    "language_model.py": {"loss": 0},
    "images_tfrecord.py": {"eval/accuracy": 0},
    "parameter_server.sh": {"staleness/mean": 0},
    "zero3.sh": {"train/loss": 0},
}
DEFAULT = ("fit_cnn.py", "custom_loop.py", "own_model.py", "parameter_server.sh")  # the others: thorough
WITHOUT_LAUNCH = {"slurm.sh", "ray_job.sh"}


def text(name):
    return (EXAMPLES / name).read_text()


def commands(name):
    """The words of each command in the text that starts Python."""
    lines = text(name).replace("\\\n", " ").replace('"$@"', "").splitlines()
    found = [re.search(r"(^|&& )(python (-m|examples/).*)", line) for line in lines]
    return [shlex.split(match[2]) for match in found if match]


def run(command, folder):
    """A command of an example as it stands there, made small, in a folder with the examples: its output."""
    environment = {**ENVIRONMENT, "PYTHONPATH": str(Path.cwd())}
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(EXAMPLES)
    ended = subprocess.run(
        [sys.executable, *command[1:]], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_every_example_says_how_it_is_run_and_what_comes_of_it():
    names = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert names == {*SMALL, *WITHOUT_LAUNCH}
    for name in names:
        head = "".join(text(name).splitlines(keepends=True)[:14])
        assert "Expected" in head and (
            f"bash examples/{name}" in head or "source scripts/environment.sh && " in head
        ), name
        assert f"examples/{name}" in head and all(len(line) <= 120 for line in text(name).splitlines()), name


@pytest.mark.slow
@pytest.mark.parametrize("name", thorough_but(set(SMALL) - {"finetune_kerashub.py"}, *DEFAULT))
def test_it_trains(name, tmp_path):
    code, output = run([*commands(name)[-1], *SMALL[name]], tmp_path)
    assert code == 0, output
    for words, least in REACHED[name].items():
        assert float(re.findall(rf"{words}\s+([\d.]+)", output)[-1]) >= least, output


@pytest.mark.slow
def test_fine_tuning_trains_or_says_what_is_missing(tmp_path):
    code, output = run([*commands("finetune_kerashub.py")[-1], *SMALL["finetune_kerashub.py"]], tmp_path)
    if importlib.util.find_spec("keras_hub"):
        assert code == 0 and "eval/accuracy" in output, output
    else:
        assert code == 2 and "this example needs KerasHub: pip install keras-hub" in output, output


@pytest.mark.slow
def test_the_plan_says_what_the_example_says():
    words = next(words for words in commands("zero3.sh") if words[2] == "tfdist.plan")
    plan = subprocess.run([sys.executable, *words[1:]], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    for part in ("ZeRO-3", "the fastest that fits; 49.8 of 80 GB", "without ZeRO it would need 182 GB"):
        assert part in plan.stdout


def in_the_shell(name, folder, *arguments, **environment):
    """The example as it is but for the virtual environment, which is that of the tests."""
    script = text(name).replace('source "$(dirname "${BASH_SOURCE[0]}")/../scripts/environment.sh"\n', "")
    assert script != text(name)
    (folder / "flags").symlink_to(Path("flags").resolve())
    path = f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", script, name, *arguments],
        cwd=folder,
        env={**ENVIRONMENT, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_slurm_job_is_written_and_submitted(tmp_path):
    (tmp_path / "sbatch").write_text('#!/bin/sh\necho "Submitted batch job 7 of $1"\n')
    (tmp_path / "sbatch").chmod(0o755)
    ended = in_the_shell("slurm.sh", tmp_path, "--epochs=3")
    assert ended.stdout == "Submitted batch job 7 of runs/slurm/job.sbatch\n", ended.stderr
    job_file = (tmp_path / "runs/slurm/job.sbatch").read_text()
    assert "#SBATCH --nodes=2" in job_file and "--epochs=3" in job_file


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_on_ray(tmp_path):
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.getcwd())  # where the actors find tfdist
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            ended = in_the_shell("ray_job.sh", tmp_path, *QUICK, "--epochs=4", RAY_ADDRESS=cluster.address)
        finally:
            cluster.shutdown()
    assert ended.returncode == 0 and "eval/accuracy" in ended.stdout, ended.stdout + ended.stderr


def test_a_flag_of_a_script_is_no_extra_of_the_environment():
    """bash hands the arguments of a script on to what it sources without any."""
    beginning = Path("scripts/environment.sh").read_text().split("find_python()")[0]
    for given, extra in (("--steps=6", ""), ("test", "test")):
        command = ["bash", "-c", f'{beginning}\necho "extra: $extra."', "bash", given]
        assert subprocess.run(command, capture_output=True, text=True).stdout == f"extra: {extra}.\n"
