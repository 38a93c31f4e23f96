"""Differences that rounding does not explain.

What rounding may do to a case is measured, not assumed: by how much the same loop in float32 and in float64 differ. The
parts of N workers are added in another order, and errors grow with the steps, so FACTOR times that is granted, and a
few units in the last place of the largest value. A fault of the kinds that are looked for is far above.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

FACTOR, OTHERS, UNITS = 20.0, 2.0, 32.0
PART = 0.05  # of the largest weight: so large a small weight's summands may be
LARGEST = 1e5  # a run that has come to such numbers has diverged
EPSILON = float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Difference:
    """One array that is not what it should be."""

    name: str
    by: float
    granted: float
    expected: float  # where the difference is largest
    found: float

    def __str__(self) -> str:
        return (
            f"{self.name} differs by {self.by:.2e} (rounding explains {self.granted:.1e}): {self.found:.8g} instead of"
            f" {self.expected:.8g}"
        )


def granted(single: Mapping[str, np.ndarray], double: Mapping[str, np.ndarray], least: float = 0.0) -> dict[str, float]:
    """name -> the difference that rounding explains. least: a part of the largest value that is granted anyway; what is
    small may be the difference of large values, each of which is rounded.

    What is infinite or beyond LARGEST in the oracle, or not the same in both precisions, tells nothing.
    """
    rounding = {name: _largest(single[name] - double[name]) for name in double}
    weights = max((value for name, value in rounding.items() if name.startswith("model/")), default=0.0)
    largest = max((_largest(value) for name, value in double.items() if name.startswith("model/")), default=0.0)
    return {
        name: (
            FACTOR * rounding[name]
            + (OTHERS * weights if name.startswith("model/") and rounding[name] else FACTOR * weights * 0.1)
            + UNITS * EPSILON * max(_largest(double[name]), 1e-3)
            + least * max(_largest(double[name]), PART * largest)
            if _tells(single[name], double[name])
            else np.inf
        )
        for name in double
    }


def differences(
    found: Mapping[str, np.ndarray],
    single: Mapping[str, np.ndarray],
    double: Mapping[str, np.ndarray],
    bounds: Mapping[str, float] | None = None,
) -> list[Difference]:
    """What cannot be explained. The middle is the run in float64."""
    bounds = bounds or granted(single, double)
    wrong = []
    for name, expected in double.items():
        value = found.get(name)
        if value is None or value.shape != expected.shape:
            wrong.append(Difference(name, np.inf, bounds[name], np.nan, np.nan))
            continue
        both_nan = np.isnan(value) & np.isnan(single[name])
        apart = np.where(both_nan, 0.0, np.abs(np.where(both_nan, 0.0, value) - np.where(both_nan, 0.0, expected)))
        apart = np.where(np.isnan(apart), np.inf, apart)
        at = np.unravel_index(np.argmax(apart), apart.shape) if apart.size else ()
        if apart.size and apart[at] > bounds[name]:
            wrong.append(Difference(name, float(apart[at]), bounds[name], float(expected[at]), float(value[at])))
    return wrong


def _tells(single: np.ndarray, double: np.ndarray) -> bool:
    return _largest(double) < LARGEST and bool(np.array_equal(np.isfinite(single), np.isfinite(double)))


def _largest(array: np.ndarray) -> float:
    finite = np.abs(np.asarray(array, np.float64))
    finite = finite[np.isfinite(finite)]
    return float(finite.max()) if finite.size else 0.0
