"""Least squares without negative parts."""

import numpy as np
import pytest

from tfdist.planner.calibrate import Terms
from tfdist.planner.least_squares import fit, nonnegative_least_squares


def test_terms_that_are_not_free_stay():
    assert list(fit([Terms(1, 2, 0)], [5.0], Terms(1.0, 99.0, 7.0), ["operations"])) == [1.0, 2.0, 7.0]


def test_least_squares_without_negative_parts_are_scipys():
    """Also where columns depend on each other, or none helps."""
    optimize = pytest.importorskip("scipy.optimize")
    random = np.random.default_rng(0)
    for case in range(60):
        matrix = random.normal(size=(random.integers(1, 7), random.integers(1, 4)))
        if case % 5 == 0:
            matrix[:, -1] = matrix[:, 0]
        target = -matrix.sum(axis=1) if case % 7 == 0 else random.normal(size=len(matrix))
        found = nonnegative_least_squares(matrix, target)
        assert found.min() >= 0
        # Of several solutions either may be found: what is left is the same.
        _, left = optimize.nnls(matrix, target)
        assert np.linalg.norm(matrix @ found - target) == pytest.approx(left, rel=1e-9, abs=1e-12)
