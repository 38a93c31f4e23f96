"""Which pairs of (feature, runtime) were drawn and compared, and cases chosen so that rare pairs come soon."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.fuzz import known, space

CANDIDATES, SPACING = 48, 1000
LOOKED_AT = 2000  # cases of each runtime
ELSEWHERE = 3  # other runtimes that see the same job, for which the oracle is computed once


class Coverage:
    """Counts of what was compared. file: to which they are added at the end of a run, and from which the next one goes
    on.

    Attributes: drawn, pairs of cases that were chosen, whatever came of them.
    """

    def __init__(self, file: str = ""):
        self.pairs: Counter[tuple[str, str]] = Counter()
        self.runtimes: Counter[str] = Counter()
        self.file = Path(file) if file else None
        if self.file and self.file.exists():
            told = json.loads(self.file.read_text())
            self.runtimes.update(told["runtimes"])
            self.pairs.update({tuple(pair.split(" on ")): count for pair, count in told["pairs"].items()})
        self.drawn = Counter(self.pairs)

    def write(self) -> None:
        if self.file:
            pairs = {" on ".join(pair): count for pair, count in sorted(self.pairs.items())}
            self.file.write_text(
                json.dumps({"runtimes": dict(sorted(self.runtimes.items())), "pairs": pairs}, indent=0)
            )

    def draw(self, case: Mapping[str, Any]) -> None:
        self.drawn.update((feature, case["runtime"]) for feature in space.features(case))

    def add(self, case: Mapping[str, Any]) -> None:
        """Of a case that was compared with its oracle, or refused as it should be."""
        self.runtimes[case["runtime"]] += len(space.parts(case))
        self.pairs.update((feature, case["runtime"]) for feature in space.features(case))

    def rarity(self, case: Mapping[str, Any]) -> float:
        """How much a case adds: the rarer its pairs are so far, the more."""
        return sum(4.0 ** -self.drawn[feature, case["runtime"]] for feature in space.features(case))

    def missing(self, runtimes: Sequence[str], least: int = 5) -> dict[tuple[str, str], int]:
        """Pairs that can be drawn but were drawn less often than `least`."""
        return {pair: self.pairs[pair] for pair in sorted(allowed_pairs(tuple(runtimes))) if self.pairs[pair] < least}

    def table(self, runtimes: Sequence[str]) -> str:
        """A line a feature, a column a runtime; a dot where a pair cannot be drawn."""
        pairs = allowed_pairs(tuple(runtimes))
        features = sorted({feature for feature, _ in (*pairs, *self.pairs)})
        width = max(map(len, features), default=0)
        lines = [
            " " * width + "".join(f"{name.replace('parameter_server', 'ps'):>15}" for name in runtimes),
            f"{'cases':{width}}" + "".join(f"{self.runtimes[name]:>15}" for name in runtimes),
        ]
        for feature in features:
            counts = (self.pairs[feature, name] or ("0" if (feature, name) in pairs else ".") for name in runtimes)
            lines.append(f"{feature:{width}}" + "".join(f"{count:>15}" for count in counts))
        return "\n".join(lines)


@cache
def allowed_pairs(runtimes: tuple[str, ...]) -> frozenset[tuple[str, str]]:
    """All pairs that can be drawn, found by drawing."""
    return frozenset(
        (feature, case["runtime"])
        for number in range(LOOKED_AT * len(runtimes))
        for case in [space.draw(-1, number, runtimes)]
        if not known.why(case)
        for feature in space.features(case)
    )


def cases(
    seed: int,
    runtimes: Sequence[str],
    coverage: Coverage,
    first: int = 0,
    with_known: bool = False,
    again: int = space.AGAIN,
) -> Iterator[dict[str, Any]]:
    """Endless cases from job `first` on, the same for the same seed, runtimes and counts; of some candidates the one
    with the rarest pairs.
    """
    number = 0
    while True:
        runtime = runtimes[number % len(runtimes)]
        draws = (space.draw(seed, number * SPACING + index, [runtime], again) for index in range(SPACING))
        there = {name for name in space.MOVABLE if name in runtimes and name != runtime}
        fitting = (
            case
            for case in draws
            # Where one of the runtimes can go on with a run no other processes are started for that.
            if (with_known or not known.why(case)) and not (there and case.get("moved", "") not in {"", *there})
        )
        candidates = list(itertools.islice(fitting, CANDIDATES))
        best = max(candidates, key=coverage.rarity)
        others = sorted(
            (case for case in space.elsewhere(best, runtimes) if with_known or not known.why(case)),
            key=coverage.rarity,
            reverse=True,
        )
        for case in (best, *others[:ELSEWHERE]):
            coverage.draw(case)
            if number >= first:
                yield case
        number += 1
