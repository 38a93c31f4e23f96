"""The most that a worker of a mesh has in memory, against the planner's formula, by scripts/bench_memory.py."""

import importlib
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


@pytest.fixture
def found(monkeypatch):
    """Measures the rows of the benchmark whose name contains a text: what was found, by name."""
    monkeypatch.syspath_prepend(Path("scripts").resolve())
    return importlib.import_module("bench_memory").found_of


def test_peaks_are_as_the_formula_says(found):
    """Measured: within 10 %, of which a third is noise."""
    for name, row in found(" on 2").items():
        assert row["peak_formula"] == pytest.approx(row["resident"], rel=0.15), (name, row)


def test_recomputation_lowers_the_peak_by_a_quarter_at_least(found):
    whole, again = found("recompute=none")["recompute=none"], found("recompute=block")["recompute=block"]
    assert again["resident"] < 0.75 * whole["resident"], (whole, again)
    assert again["peak_formula"] == pytest.approx(again["allocated"], rel=0.15), again
