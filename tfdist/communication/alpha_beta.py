"""The alpha-beta model of measured times: a + S / b by least squares, checked on sizes that were held out. With six
sizes or more the line may have a knee (`Line`), as it has on one host, where the caches are faster than the memory.

A collective of n members costs L messages one after another and sends F * S bytes through each link: L alpha + F S /
beta. Algorithms differ in L and F (planner/communication.py has their times). At a single n they all fit a line a + S /
b equally well, but imply different links; over several n the error of the joint fit shows which algorithm is at work.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tfdist.communication.measurement import Measurement
from tfdist.planner import communication as models
from tfdist.planner.communication import Link
from tfdist.planner.least_squares import fit

_SEEN = 1e15  # bytes per second; from here on a bandwidth is shown as infinite
_FEWEST_FOR_A_KNEE = 6  # number of sizes
_STRAIGHT_ENOUGH = 0.05  # relative error, root mean square
Seconds = Callable[[int, float, Link], float]  # of n members, S bytes, link


def _half(all_reduce: Seconds) -> Seconds:
    """Half the time of an all-reduce: reducing and distributing take the same time."""
    return lambda n, size, link: all_reduce(n, size, link) / 2


# Collective -> algorithm. Sources in planner/communication.py.
ALGORITHMS: dict[str, dict[str, Seconds]] = {
    "all_reduce": models.FLAT,
    "all_gather": {"ring": models.ring_pass, "halving_doubling": _half(models.halving_doubling_all_reduce)},
    "reduce_scatter": {"ring": models.ring_pass, "halving_doubling": _half(models.halving_doubling_all_reduce)},
    "all_to_all": {"pairwise": models.all_to_all},
    "broadcast": {
        "tree": _half(models.tree_all_reduce),
        "ring": lambda n, size, link: (n - 1) * link.alpha + size / link.beta,
    },
}


@dataclass(frozen=True)
class Line:
    """seconds = alpha + size / beta for one collective at one number of members, with another slope above a knee: data
    that no longer fits into a cache travels at the speed of memory."""

    alpha: float  # seconds
    beta: float  # bytes per second
    knee: float  # bytes
    beyond: float  # additional seconds per byte above the knee

    def seconds(self, size: float) -> float:
        return self.alpha + size / self.beta + max(0.0, size - self.knee) * self.beyond

    def describe(self) -> str:
        line = f"{self.alpha * 1e6:.1f} us + bytes / {show_rate(self.beta)}"
        return (
            line
            if math.isinf(self.knee)
            else f"{line}; above {self.knee:,.0f} bytes {show_rate(1 / (1 / self.beta + self.beyond))}"
        )


def show_rate(beta: float) -> str:
    """A bandwidth as text; infinite if no size was large enough to tell it from infinity."""
    return f"{beta / 1e9:.3f} GB/s" if beta < _SEEN else "inf GB/s"


def split(measurements: Sequence[Measurement]) -> tuple[list[Measurement], list[Measurement]]:
    """(to fit, held out) by size: holds out every second size, but never the first or the last."""
    ordered = sorted(measurements, key=lambda one: one.size)
    held = [one for index, one in enumerate(ordered) if index % 2 and one is not ordered[-1]]
    return [one for one in ordered if one not in held], held


def fit_line(measurements: Iterable[Measurement]) -> Line:
    """Fits a line by least squares over relative errors, so that small sizes count as much as large ones; no term is
    negative. If the straight line errs, and a knee at one of the sizes, or half-way between two, leaves less than half
    of the squared error, the line has that knee."""
    found = sorted(measurements, key=lambda one: one.size)
    straight = _fit_with_knee(found, math.inf)
    sizes = [float(one.size) for one in found]
    knees = (
        sorted({*sizes[1:-1], *(math.sqrt(a * b) for a, b in zip(sizes[1:], sizes[2:], strict=False))})
        if len(found) >= _FEWEST_FOR_A_KNEE
        else []
    )
    bent = min(
        (_fit_with_knee(found, knee) for knee in knees), key=lambda line: _squared(line, found), default=straight
    )
    errs = _squared(straight, found)
    return bent if errs > len(found) * _STRAIGHT_ENOUGH**2 and _squared(bent, found) < errs / 2 else straight


class _LineTerms(NamedTuple):
    """The terms of a `Line`: seconds, and seconds per byte."""

    alpha: float
    per_byte: float
    beyond: float


def _fit_with_knee(found: Sequence[Measurement], knee: float) -> Line:
    rows = [_LineTerms(1.0, one.size, max(0.0, one.size - knee)) for one in found]
    free = ["alpha", "per_byte"] if math.isinf(knee) else ["alpha", "per_byte", "beyond"]
    terms = fit(rows, [one.seconds for one in found], _LineTerms(0.0, 0.0, 0.0), free)
    return Line(terms.alpha, 1 / terms.per_byte, knee, terms.beyond)


def _squared(line: Line, found: Sequence[Measurement]) -> float:
    return sum(error**2 for error in errors(lambda one: line.seconds(one.size), found))


class _LinkTerms(NamedTuple):
    """The terms of a link: seconds, and seconds per byte."""

    alpha: float
    per_byte: float


def fit_link(algorithm: Seconds, measurements: Iterable[Measurement]) -> Link:
    """The link that explains measurements, at one or several numbers of members, if `algorithm` was used."""
    found = list(measurements)
    one_second, one_byte = Link(1.0, float("inf")), Link(0.0, 1.0)
    rows = [
        _LinkTerms(algorithm(one.members, one.size, one_second), algorithm(one.members, one.size, one_byte))
        for one in found
    ]
    terms = fit(rows, [one.seconds for one in found], _LinkTerms(0.0, 0.0), ["alpha", "per_byte"])
    return Link(terms.alpha, 1 / terms.per_byte)


def errors(predict: Callable[[Measurement], float], measurements: Iterable[Measurement]) -> list[float]:
    """The relative errors of predicted against measured times."""
    return [predict(one) / one.seconds - 1 for one in measurements]


@dataclass(frozen=True)
class Explanation:
    """The link that an algorithm implies, and how well it explains the measurements."""

    algorithm: str
    link: Link
    error: float  # median of the absolute relative errors


def explain(collective: str, measurements: Sequence[Measurement]) -> list[Explanation]:
    """Fits each algorithm that might be in use; returns an explanation for each, the best first."""
    found = []
    for name, seconds in ALGORITHMS[collective].items():
        link = fit_link(seconds, measurements)
        off = errors(lambda one, seconds=seconds, link=link: seconds(one.members, one.size, link), measurements)
        found.append(Explanation(name, link, statistics.median(map(abs, off))))
    return sorted(found, key=lambda one: one.error)
