"""Finds differences that rounding does not explain.

The effect of rounding on a case is measured, not assumed: it is the difference between the same loop in float32 and in
float64. N workers add their parts in another order, and errors grow with the steps. So FACTOR times that difference is
granted, plus a few units in the last place of the largest value. The faults that the fuzzer looks for are far larger.

Two runs tell little where rounding matters much for a few numbers: Adam divides a gradient that is only rounding error
by its own size. If two runs do not explain a difference, more runs are made, and the bound of each single number
follows from its spread over these runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

FACTOR, OTHERS, UNITS = 20.0, 2.0, 32.0
PART = 0.05  # relative to the largest weight: the summands of a small weight may be this large
LARGEST = 1e5  # a run whose numbers become this large has diverged
EPSILON = float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Difference:
    """One array that is not what it should be."""

    name: str
    by: float
    granted: float
    expected: float  # where the difference exceeds its bound most
    found: float

    def __str__(self) -> str:
        return (
            f"{self.name} differs by {self.by:.2e} (rounding explains {self.granted:.1e}): {self.found:.8g} instead of"
            f" {self.expected:.8g}"
        )


def least_granted(double: Mapping[str, np.ndarray], least: float = 0.0) -> dict[str, float]:
    """name -> the difference that is granted even if rounding changes less in this case. least: see `granted`."""
    largest = max((_largest(value) for name, value in double.items() if name.startswith("model/")), default=0.0)
    return {
        name: UNITS * EPSILON * max(_largest(value), 1e-3) + least * max(_largest(value), PART * largest)
        for name, value in double.items()
    }


def granted(single: Mapping[str, np.ndarray], double: Mapping[str, np.ndarray], least: float = 0.0) -> dict[str, float]:
    """name -> the difference that rounding explains. least: a fraction of the largest value that is always granted: a
    small number may be the difference of large ones, each of which is rounded.

    Arrays with numbers beyond LARGEST in the oracle, or with infinities or NaN in other places in float32 than in
    float64, tell nothing: any difference is granted.
    """
    rounding = {name: _largest(single[name] - double[name]) for name in double}
    weights = max((value for name, value in rounding.items() if name.startswith("model/")), default=0.0)
    floor = least_granted(double, least)
    return {
        name: (
            FACTOR * rounding[name]
            + (OTHERS * weights if name.startswith("model/") and rounding[name] else FACTOR * weights * 0.1)
            + floor[name]
            if _tells(single[name], double[name])
            else np.inf
        )
        for name in double
    }


def granted_by(
    runs: Sequence[Mapping[str, np.ndarray]],
    double: Mapping[str, np.ndarray],
    bounds: Mapping[str, float | np.ndarray],
) -> dict[str, np.ndarray]:
    """name -> for each number, the difference that rounding explains, measured by runs that differ by rounding alone.
    Never less than `bounds`."""
    spread = {
        name: np.max([_apart(run[name], expected, expected) for run in runs], axis=0)
        for name, expected in double.items()
    }
    weights = max((_largest(each) for name, each in spread.items() if name.startswith("model/")), default=0.0)
    return {
        name: np.maximum(
            bounds[name],
            FACTOR * spread[name] + (OTHERS if name.startswith("model/") else FACTOR * 0.1) * weights,
        )
        for name in double
    }


def differences(
    found: Mapping[str, np.ndarray],
    single: Mapping[str, np.ndarray],
    double: Mapping[str, np.ndarray],
    bounds: Mapping[str, float | np.ndarray] | None = None,
) -> list[Difference]:
    """Returns the differences from the float64 run that cannot be explained."""
    bounds = bounds or granted(single, double)
    wrong = []
    for name, expected in double.items():
        value, bound = found.get(name), np.broadcast_to(bounds[name], expected.shape)
        if value is None or value.shape != expected.shape:
            wrong.append(Difference(name, np.inf, 0.0, np.nan, np.nan))
            continue
        apart = _apart(value, expected, single[name])
        too_far = np.where(apart > bound, apart / np.maximum(bound, EPSILON**4), 0.0)
        if too_far.any():
            at = np.unravel_index(np.argmax(too_far), apart.shape)
            wrong.append(Difference(name, float(apart[at]), float(bound[at]), float(expected[at]), float(value[at])))
    return wrong


def _apart(value: np.ndarray, expected: np.ndarray, single: np.ndarray) -> np.ndarray:
    """Returns by how much each number differs; infinite where only one is NaN. single: where it is NaN, `value` may be
    NaN, too."""
    both_nan = np.isnan(value) & np.isnan(single)
    with np.errstate(invalid="ignore"):
        apart = np.abs(np.where(both_nan, 0.0, value) - np.where(both_nan, 0.0, expected))
    return np.where(value == expected, 0.0, np.where(np.isnan(apart), np.inf, apart))


def _tells(single: np.ndarray, double: np.ndarray) -> bool:
    return _largest(double) < LARGEST and bool(np.array_equal(np.isfinite(single), np.isfinite(double)))


def _largest(array: np.ndarray) -> float:
    finite = np.abs(np.asarray(array, np.float64))
    finite = finite[np.isfinite(finite)]
    return float(finite.max()) if finite.size else 0.0
