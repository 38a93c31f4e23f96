"""A trial that dies, hangs or computes wrong is a finding, and leaves nothing behind."""

import sys
import time

import pytest

from tests.e2e.job import wait_for
from tfdist.diagnosis.findings import State
from tfdist.diagnosis.trial import cudnn_version
from tfdist.diagnosis.trials import arithmetic

BUILD = """print('{"build": {"cuda": "12.5.1", "capabilities": ["sm_80"], "devices": 2}}', flush=True)\n"""
GOOD = """print('{"name": "matrix product, float32, on GPU:0", "seconds": 0.01}', flush=True)\n"""


def tried(code, seconds=60.0):
    build, findings = arithmetic([sys.executable, "-c", code], seconds)
    return build, "\n".join(map(str, findings)), {finding.state for finding in findings}


def test_a_good_one():
    build, said, states = tried(BUILD + GOOD)
    assert states == {State.FINE} and "1 trials are right; the slowest took 10.0 ms" in said
    assert build is not None and build.devices == 2 and build.capabilities == ("sm_80",)


def test_the_cudnn_that_was_loaded():
    build, _, _ = tried(BUILD + GOOD + """print('{"cudnn": "9.10.2"}')""")
    assert build is not None and build.cudnn == "9.10.2"
    assert [cudnn_version(number) for number in (92400, 91002, 8905)] == ["9.24.0", "9.10.2", "8.9.5"]


def test_a_wrong_result():
    _, said, states = tried(BUILD + GOOD + """print('{"name": "convolution, XLA", "error": "no supported configs"}')""")
    assert states == {State.WRONG} and "convolution, XLA: no supported configs" in said


def test_one_that_dies():
    _, said, states = tried(GOOD + "import os; print('a word', flush=True); os.kill(os.getpid(), 11)")
    assert states == {State.WRONG} and "killed by signal 11 (SIGSEGV) after matrix product, float32" in said
    assert "Its last output: a word" in said
    build, said, _ = tried("raise ImportError('libcudart.so')")
    assert build is None and "exit code 1 after the import of TensorFlow" in said and "libcudart.so" in said


@pytest.mark.slow
def test_one_that_hangs(tmp_path):
    """With a child of its own, which must not live on."""
    child = f"import time, pathlib\nwhile True: pathlib.Path({str(tmp_path / 'alive')!r}).touch(); time.sleep(0.05)"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); {GOOD}time.sleep(600)"
    _, said, states = tried(code, 3.0)
    assert states == {State.WRONG} and "it hung for 3 s after matrix product, float32" in said
    if (alive := tmp_path / "alive").exists():
        alive.unlink()
    before = time.monotonic()
    wait_for(lambda: time.monotonic() > before + 0.5, 10)
    assert not alive.exists()
