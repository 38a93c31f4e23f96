"""One, two and three replicas of one process compute what plain Keras computes: each of replica_cases.CASES."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.parity.replica_cases import CASES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.thorough)])
def results(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("replicas") / "results.json"
    made = subprocess.run(
        [sys.executable, "-m", "tests.parity.replica_cases", str(out), request.param], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", CASES)
def test_as_plain_keras(results, name):
    assert results[name]
    problems = {
        replicas: found for replicas, found in results[name].items() if not isinstance(found, float) or not found <= 1.0
    }
    assert not problems, "\n".join(f"{replicas} replicas: {found}" for replicas, found in problems.items())
