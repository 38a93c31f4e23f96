"""The faults of scripts/inject_faults.py still find their place in the code."""

from __future__ import annotations

import pytest

from scripts.inject_faults import FAULTS
from tests.fuzz.faults import REPOSITORY


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_changes_one_place(name):
    fault = FAULTS[name]
    assert (REPOSITORY / "tfdist" / fault.file).read_text().count(fault.text) == 1
    for test in fault.tests:
        assert (REPOSITORY / test.partition("::")[0]).exists(), test
