"""The fixed set of cases: what tfdist makes of drawn combinations is what plain Keras makes of them. scripts/fuzz.py draws more."""

from __future__ import annotations

import json

import pytest

from tests.fuzz import fixed, space
from tests.fuzz.coverage import Coverage, allowed_pairs, cases
from tests.fuzz.fleet import judge_all
from tests.fuzz.pool import Pool


@pytest.mark.slow
def test_fixed_cases():
    chosen, pool = fixed.cases(), Pool()
    assert len(chosen) == 150
    try:
        pool.start({case["runtime"] for case in chosen})
        verdicts = list(judge_all(chosen, pool))
    finally:
        pool.close()
    wrong = [verdict for verdict in verdicts if verdict.bad]
    assert not wrong, "\n".join(f"{verdict.case['runtime']}: {'; '.join(verdict.problems)}\n  scripts/fuzz.py --replay='{json.dumps(verdict.case)}'" for verdict in wrong)
    assert sum(bool(verdict.refused) for verdict in verdicts) <= 15
    assert sum(verdict.rough > 1e-3 for verdict in verdicts) <= 30, "most of the cases must be able to show a difference"


def test_a_seed_draws_the_same_cases_again():
    assert [space.draw(3, number, list(space.RUNTIMES)) for number in range(50)] == [space.draw(3, number, list(space.RUNTIMES)) for number in range(50)]


def test_every_pair_that_can_be_drawn_comes_soon():
    runtimes = ("one_device", "mirrored:2", "fit:2")
    coverage, source = Coverage(), None
    source = cases(1, runtimes, coverage)
    for _ in range(900):
        next(source)
    missing = coverage.missing(runtimes)
    assert len(missing) < 0.05 * len(allowed_pairs(runtimes)), missing
