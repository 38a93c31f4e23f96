"""Compressed gradients train as well as whole ones, and are as small as they claim to be."""

import io
import json
import sys

import pytest

from tests.e2e.job import ENVIRONMENT
from tfdist.control.launcher import LocalJob

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["digits", pytest.param("text", marks=pytest.mark.thorough)])
def test_compression(name, tmp_path):
    output = io.StringIO()
    job = LocalJob([sys.executable, "-m", "tests.multi.compression", name], 2, tmp_path, pin=False, environment=ENVIRONMENT, output=output)
    job.start()
    result = job.wait()
    assert result.code == 0, f"{result.cause}\n{output.getvalue()}"
    found = json.loads(output.getvalue().partition("found ")[2].splitlines()[0])
    print(found)
    whole = found["none"][0]
    for kind, (loss, sent, wire) in found.items():
        if kind != "topk without feedback":
            assert abs(loss - whole) <= 0.01 * whole, (kind, loss, whole)
            assert sent <= wire <= sent + 200, (kind, sent, wire)  # the sums of loss and metrics, and padding, come on top
    worse = {name: found[name][0] - whole for name in ("topk without feedback", "topk")}
    assert worse["topk without feedback"] > 2 * worse["topk"], found
