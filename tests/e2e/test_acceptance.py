"""The whole acceptance of GPUs, rehearsed on the CPU: so that it cannot be broken on the day."""

import json
import subprocess
import sys

import pytest

from tests.e2e.job import ENVIRONMENT


@pytest.mark.slow
@pytest.mark.thorough
def test_the_rehearsal_passes(tmp_path):
    command = [sys.executable, "scripts/acceptance/run.py", "--rehearse", f"--out={tmp_path}"]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    report = json.loads((tmp_path / "acceptance.json").read_text())
    assert ended.returncode == 0, ended.stdout
    assert {each["state"] for each in report["stages"]} == {"passed"} and len(report["stages"]) == 7
    assert (tmp_path / "acceptance.html").read_text().count("<svg") >= 5
