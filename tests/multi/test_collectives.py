"""Every collective over whole clusters and sub-groups, with its gradient, in real processes."""

import io
import sys

import pytest

from tests.e2e.job import ENVIRONMENT
from tfdist.launcher.local_job import LocalJob

pytestmark = pytest.mark.slow


def run(workers, argument, tmp_path):
    output = io.StringIO()
    job = LocalJob(
        [sys.executable, "-m", "tests.multi.collectives", argument],
        workers,
        tmp_path,
        pin=False,
        environment=ENVIRONMENT,
        output=output,
        grace=3.0,
    )
    job.start()
    return job.wait(), output.getvalue()


@pytest.mark.parametrize(
    "workers, mesh", [pytest.param(3, "data=3", marks=pytest.mark.thorough), (4, "data=2,model=2")]
)
def test_collectives(workers, mesh, tmp_path):
    result, output = run(workers, mesh, tmp_path)
    assert result.code == 0, f"{result.cause}\n{output}"
    assert output.count("is as it must be") == workers


def test_a_wrong_group_is_an_error_that_names_ranks(tmp_path):
    result, output = run(3, "wrong", tmp_path)
    assert result.code == 6, output
    assert "ranks 0, 1, 2" in output and "--collective_timeout" in output and "met" not in output


def test_a_stuck_rank_is_an_error_on_the_others(tmp_path):
    result, output = run(3, "stuck", tmp_path)
    assert result.code == 6, output
    assert "has waited for more than --collective_timeout=4 s" in output and "next" not in output
