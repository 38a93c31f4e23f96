"""The examples, by the commands that stand in them.

Jobs of tfdist.launch run in forks (forks.py), which costs a third of starting them; those that need what is not
installed here, or the shell, run as they are.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.job import ENVIRONMENT

EXAMPLES = Path("examples").resolve()
QUICK = ["--export=none", "--noplot", "--trackers=none", "--eval_samples=400"]
# What makes a job small; those without are run as they stand.
SMALL = {
    "fit_cnn.py": [],
    "custom_loop.py": [],
    "own_model.py": QUICK,
    "language_model.py": ["5"],
    "images_tfrecord.py": [*QUICK, "--epochs=1"],
    "finetune_kerashub.py": [*QUICK, "--steps=10"],
    "parameter_server.sh": [*QUICK, "--steps=60"],
    "zero3.sh": [*QUICK, "--steps=6"],
}
WITHOUT_LAUNCH = {"slurm.sh", "ray_job.sh"}


def text(name):
    return (EXAMPLES / name).read_text()


def commands(name):
    """The words of each command in the text that starts a module of tfdist."""
    lines = text(name).replace("\\\n", " ").replace('"$@"', "").splitlines()
    found = [line[line.index("python -m tfdist.") :] for line in lines if "python -m tfdist." in line]
    return [shlex.split(line) for line in found]


def job(name):
    """As forks.py takes it: of the last command, or, if there is none, of the script itself."""
    (words,) = [words for words in commands(name) if words[2] == "tfdist.launch"]
    at = words.index("--")
    own = dict(flag.lstrip("-").split("=") for flag in words[3:at])
    return {
        "name": name,
        "workers": int(own["workers"]),
        "servers": int(own.get("ps", 0)),
        "arguments": [*words[at + 1 :], *SMALL[name]],
    }


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
def test_they_train(tmp_path):
    """And those with a figure that are not made small reach it."""
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}{os.pathsep}{EXAMPLES}"}
    (tmp_path / "examples").symlink_to(EXAMPLES)
    write = "import images_tfrecord as example; example.write(); print(*example.COMMAND[3:], *example.FLAGS)"
    written = subprocess.run(
        [sys.executable, "-c", write], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    workers, _, *images = written.stdout.split()
    assert workers == "--workers=2"
    jobs = [job(name) for name in SMALL if name != "images_tfrecord.py"]
    jobs.append({"name": "images_tfrecord.py", "workers": 2, "arguments": [*images, *SMALL["images_tfrecord.py"]]})
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    ended = subprocess.run(
        [sys.executable, Path("tests/e2e/forks.py").resolve(), "jobs.json"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ended.returncode == 0, ended.stderr
    said = {one["name"]: (tmp_path / f"{one['name']}-0.log").read_text() for one in jobs}
    codes = json.loads(ended.stdout)
    if importlib.util.find_spec("keras_hub") is None:
        assert set(codes.pop("finetune_kerashub.py")) & {2}
        sentence = "this example needs KerasHub: pip install keras-hub"
        assert any(sentence in path.read_text() for path in tmp_path.glob("finetune_kerashub.py-*.log"))
    for name, found in codes.items():
        assert set(found) == {0}, said[name]

    def figure(name, words):
        return float(re.findall(rf"{words}\s+([\d.]+)", said[name])[-1])

    assert figure("fit_cnn.py", "validation accuracy") >= 0.92
    assert figure("custom_loop.py", "epoch 6: accuracy") >= 0.95
    assert figure("own_model.py", "eval/accuracy") >= 0.98
    assert figure("language_model.py", "loss") < 5.5
    assert "staleness/mean" in said["parameter_server.sh"] and "step 6/6" in said["zero3.sh"]


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
