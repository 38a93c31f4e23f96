"""Compressed gradients train as well as whole ones, and are as small as they claim to be."""

import io
import json
import sys

import pytest

from tests.e2e.job import ENVIRONMENT
from tfdist.launcher.local_job import LocalJob

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "arguments", [["digits"], *(pytest.param([name, "all"], marks=pytest.mark.thorough) for name in ("digits", "text"))]
)
def test_compression(arguments, tmp_path):
    output = io.StringIO()
    job = LocalJob(
        [sys.executable, "-m", "tests.multi.compression", *arguments],
        2,
        tmp_path,
        pin=False,
        environment=ENVIRONMENT,
        output=output,
    )
    job.start()
    result = job.wait()
    assert result.code == 0, f"{result.cause}\n{output.getvalue()}"
    found = json.loads(output.getvalue().partition("found ")[2].splitlines()[0])
    print(found)
    whole = found["none"][0]
    for kind, (loss, sent, wire) in found.items():
        if "at once" not in kind and "without" not in kind:
            assert abs(loss - whole) <= 0.01 * whole, (kind, loss, whole)
        if kind.partition(" ")[0] in ("none", "fp16", "bf16", "int8") or "at once" in kind:
            assert sent <= wire <= sent + 200, (
                kind,
                sent,
                wire,
            )  # the sums of loss and metrics, and padding, come on top
    worse = {kind: found[kind][0] - whole for kind in found}
    assert worse["topk without feedback"] > 2 * worse["topk"], found
    if "digits" in arguments:  # on text, what is sent at once harms with feedback, too: compression.py
        assert worse["topk at once without feedback"] > max(10 * worse["topk at once"], 0.1 * whole), found


def test_resumed_is_bit_for_bit(tmp_path):
    """Every worker carries its own error, and finds it again."""
    output = io.StringIO()
    job = LocalJob(
        [sys.executable, "-m", "tests.multi.compression", "resumed", str(tmp_path / "snapshots")],
        2,
        tmp_path,
        pin=False,
        environment=ENVIRONMENT,
        output=output,
    )
    job.start()
    result = job.wait()
    assert result.code == 0, f"{result.cause}\n{output.getvalue()}"
    assert json.loads(output.getvalue().partition("found ")[2].splitlines()[0]) == {
        kind: [[], []] for kind in ("int8", "topk", "powersgd")
    }
