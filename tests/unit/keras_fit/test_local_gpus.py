"""A script on a machine with several GPUs becomes a job of as many workers. The machine is made up: its nvidia-smi is a
script, and TensorFlow sees no GPU.
"""

import subprocess
import sys
from types import SimpleNamespace

import pytest

import tfdist
from tests.e2e.job import ENVIRONMENT
from tfdist.control.exit_codes import ConfigError
from tfdist.keras_fit import joining
from tfdist.keras_fit.local_gpus import started_again

pytestmark = pytest.mark.usefixtures("warm_start")

SCRIPT = """
import os, sys
import tfdist
{before}
runtime = tfdist.init({options})
print("rank", runtime.rank, "of", runtime.size, "with", os.environ.get("CUDA_VISIBLE_DEVICES"), *sys.argv[1:])
"""


def ran(folder, options="", before="", *, gpus=2, **environment):
    """What `python script.py a b` says on a machine with so many GPUs, and its exit code."""
    (folder / "bin").mkdir()
    driver = folder / "bin" / "nvidia-smi"
    driver.write_text("#!/bin/sh\n" + "".join(f"echo 'GPU {n}: Fake (UUID: GPU-{n}{n})'\n" for n in range(gpus)))
    driver.chmod(0o755)
    script = folder / "script.py"
    script.write_text(SCRIPT.format(options=options, before=before))
    inherited = {name: value for name, value in ENVIRONMENT.items() if name != "CUDA_VISIBLE_DEVICES"}
    inherited["PATH"] = f"{folder / 'bin'}:{inherited['PATH']}"
    ended = subprocess.run(
        [sys.executable, str(script), "a", "b c"],
        env={**inherited, **environment},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return ended.stdout, ended.returncode


@pytest.mark.slow
def test_a_worker_for_each(tmp_path):
    output, code = ran(tmp_path)
    assert code == 0 and "2 GPUs were found: this script is restarted with a worker for each" in output, output
    for rank, gpu in enumerate(("GPU-00", "GPU-11")):
        assert f"rank {rank} of 2 with {gpu} a b c" in output, output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "before", "environment", "words"),
    [
        ("local_gpus='one'", "", {}, ""),
        (
            "",
            "import tensorflow as tf; tf.ones(1)",
            {},
            "init() at the top of the script, or start it with `tfdist launch --workers=2",
        ),
        ("", "", {"CUDA_VISIBLE_DEVICES": "1"}, ""),
        ("", "", {"TFDIST_JOB_ID": "of a launcher"}, ""),
    ],
    ids=["one", "late", "one visible", "launched"],
)
def test_one(options, before, environment, words, tmp_path):
    output, code = ran(tmp_path, options, before, **environment)
    assert code == 0 and "rank 0 of 1" in output and words in output, output
    assert ("one is used" in output) == bool(words)


def test_what_can_be_started_again(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("")
    main = SimpleNamespace(__spec__=None, __file__=str(script))
    argv = [str(script), "--a"]
    assert started_again(main, argv) == argv
    assert started_again(SimpleNamespace(__spec__=None), argv) == []  # a notebook
    assert started_again(SimpleNamespace(__spec__=SimpleNamespace(name="pytest.__main__"), __file__="x"), argv) == []
    assert started_again(main, [str(tmp_path / "gone.py")]) == [] and started_again(main, ["pytest"]) == []


def test_other_words_are_refused(monkeypatch):
    monkeypatch.setattr(joining, "_runtime", None)
    with pytest.raises(ConfigError, match=r"tfdist.init\(local_gpus='two'\): use 'all' or 'one'"):
        tfdist.init(local_gpus="two")
