"""Least squares for the terms of a step time: over relative errors, with no negative term."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    import numpy as np

_SMALLEST = 1e-18  # seconds per operation or byte; keeps rates finite

Terms = TypeVar("Terms", bound=NamedTuple)  # the first field is a fixed cost, the others are amounts that have a rate


def fit(rows: Sequence[Terms], seconds: Sequence[float], known: Terms, free: Collection[str]) -> Terms:
    """Returns coefficients c >= 0 with rows @ c = seconds, by least squares over relative errors. Fields not in `free`
    keep their values in `known`.
    """
    import numpy as np

    places = [known._fields.index(name) for name in free]
    measured = np.array(seconds)
    matrix = np.array(rows, float) / measured[:, None]
    coefficients = np.array(known, float)
    coefficients[places] = 0.0
    scale = matrix[:, places].max(axis=0)
    solved = nonnegative_least_squares(matrix[:, places] / scale, np.maximum(1 - matrix @ coefficients, 0.0))
    coefficients[places] = solved / scale
    fixed, *rates = map(float, coefficients)
    found = [fixed, *(max(rate, _SMALLEST) for rate in rates)]
    return known._replace(**dict(zip(known._fields, found, strict=True)))


def nonnegative_least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Returns the x >= 0 that minimizes |matrix @ x - target|, for a few columns.

    It is the unconstrained solution on the columns where it is positive (Lawson and Hanson, Solving Least Squares
    Problems, 1974, chapter 23). So every choice of columns is tried, and the best solution without negatives is taken.
    """
    import numpy as np

    columns = matrix.shape[1]
    best, least = np.zeros(columns), float(target @ target)
    for chosen in itertools.product((False, True), repeat=columns):
        trial, some = np.zeros(columns), np.flatnonzero(chosen)
        trial[some] = np.linalg.lstsq(matrix[:, some], target, rcond=None)[0]
        error = target - matrix @ trial
        if trial.min() >= 0 and error @ error < least:
            best, least = trial, float(error @ error)
    return best
