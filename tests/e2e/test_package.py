"""The package as a stranger gets it: an sdist, the wheel made of it, installed and used outside of the repository."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import tfdist
from tests.e2e.job import ENVIRONMENT

pytestmark = pytest.mark.slow

BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE")
BUILD = """
import os, sys, tarfile
from setuptools import build_meta
out = sys.argv[1]
source = build_meta.build_sdist(out)
tarfile.open(os.path.join(out, source)).extractall(out, filter="data")
os.chdir(os.path.join(out, source.removesuffix(".tar.gz")))
build_meta.build_wheel(out)
"""
MINE = """
import keras, numpy
def data(split):
    x = numpy.random.default_rng(len(split)).normal(size=(48, 4)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)
def model():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
"""
TINY = ["--source=mine:data", "--model=mine:model", "--global_batch=16", "--steps=4"]
QUICK = [
    "--strategy=sockets",
    "--log_every=2",
    "--eval_every=-1",
    "--phase_every=0",
    "--export=none",
    "--trackers=none",
    "--noplot",
]


@pytest.fixture
def installed(tmp_path):
    """Runs commands of a virtual environment with the wheel, which sees the other packages of this one: TensorFlow is
    not installed again."""
    environment = {key: value for key, value in ENVIRONMENT.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    venv = tmp_path / "venv"

    def run(command, *arguments, cwd):
        ended = subprocess.run(
            [venv / "bin" / command, *map(str, arguments)],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    packages = next(venv.glob("lib/python3*/site-packages"))
    (packages / "of_the_tests.pth").write_text("\n".join(site.getsitepackages()))
    if not importlib.util.find_spec("setuptools"):
        run("python", "-m", "pip", "install", "--quiet", "setuptools>=77", cwd=tmp_path)

    source, dist = tmp_path / "source", tmp_path / "dist"
    dist.mkdir()
    shutil.copytree("tfdist", source / "tfdist", ignore=shutil.ignore_patterns("__pycache__"))
    for name in BUILT_FROM:
        shutil.copy(name, source)
    run("python", "-c", BUILD, dist, cwd=source)  # the wheel is made of what the sdist holds
    run("python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", *dist.glob("*.whl"), cwd=tmp_path)
    return run


def test_built_installed_and_used_elsewhere(installed, tmp_path):
    version, dist, elsewhere = tfdist.__version__, tmp_path / "dist", tmp_path / "elsewhere"
    files = {path.as_posix() for path in Path("tfdist").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    wheel = zipfile.ZipFile(dist / f"tfdist-{version}-py3-none-any.whl")
    assert {name for name in wheel.namelist() if name.startswith("tfdist/")} == files  # py.typed and templates too
    assert f"tfdist-{version}.dist-info/licenses/LICENSE" in wheel.namelist()
    with tarfile.open(dist / f"tfdist-{version}.tar.gz") as sdist:
        assert {f"tfdist-{version}/{name}" for name in (*files, *BUILT_FROM)} <= set(sdist.getnames())

    elsewhere.mkdir()
    (elsewhere / "mine.py").write_text(MINE)
    said = installed("python", "-c", "import tfdist; print(tfdist.__file__)", cwd=elsewhere)
    assert said.startswith(str(tmp_path / "venv")) and installed("tfdist", "--version", cwd=elsewhere) == (
        f"tfdist {version}\n"
    )
    said = installed("tfdist", "launch", "--workers=2", "--", *TINY, *QUICK, "--run_dir=runs/a", cwd=elsewhere)
    assert "step 4/4" in said and "2 workers" in said
    run = elsewhere / "runs" / "a"
    assert json.loads((run / "summary.json").read_text())["steps"] == 4
    installed("tfdist", "report", "runs/a", cwd=elsewhere)
    assert b"<svg" in (run / "report.html").read_bytes()
    job = installed(
        "tfdist",
        "jobs",
        "kubernetes",
        "--image=a",
        "--workers=2",
        "--claim=runs",
        "--",
        *TINY,
        "--run_dir=/runs/a",
        cwd=elsewhere,
    )
    assert re.search("kind: Job", job) and "--model=mine:model" in job
