"""Which pairs of (feature, runtime) were drawn, and cases chosen so that rare pairs come soon."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from tests.fuzz import known, space

CANDIDATES, SPACING, LOOKED_AT = 8, 1000, 30_000


class Coverage:
    """Counts of what was drawn."""

    def __init__(self):
        self.pairs: Counter[tuple[str, str]] = Counter()
        self.runtimes: Counter[str] = Counter()

    def add(self, case: Mapping[str, Any]) -> None:
        self.runtimes[case["runtime"]] += 1
        self.pairs.update((feature, case["runtime"]) for feature in space.features(case))

    def rarity(self, case: Mapping[str, Any]) -> float:
        """How much a case adds: the rarer its pairs are so far, the more."""
        return sum(4.0 ** -self.pairs[feature, case["runtime"]] for feature in space.features(case))

    def missing(self, runtimes: Sequence[str], least: int = 5) -> dict[tuple[str, str], int]:
        """Pairs that can be drawn but were drawn less often than `least`."""
        return {pair: self.pairs[pair] for pair in sorted(allowed_pairs(tuple(runtimes))) if self.pairs[pair] < least}

    def table(self, runtimes: Sequence[str]) -> str:
        """A line a feature, a column a runtime; a dot where a pair cannot be drawn."""
        pairs = allowed_pairs(tuple(runtimes))
        features = sorted({feature for feature, _ in (*pairs, *self.pairs)})
        width = max(map(len, features), default=0)
        lines = [" " * width + "".join(f"{name.replace('parameter_server', 'ps'):>15}" for name in runtimes),
                 f"{'cases':{width}}" + "".join(f"{self.runtimes[name]:>15}" for name in runtimes)]
        for feature in features:
            counts = (self.pairs[feature, name] or ("0" if (feature, name) in pairs else ".") for name in runtimes)
            lines.append(f"{feature:{width}}" + "".join(f"{count:>15}" for count in counts))
        return "\n".join(lines)


@cache
def allowed_pairs(runtimes: tuple[str, ...]) -> frozenset[tuple[str, str]]:
    """All pairs that can be drawn, found by drawing."""
    return frozenset((feature, case["runtime"]) for number in range(LOOKED_AT) for case in [space.draw(-1, number, runtimes)] if not known.why(case) for feature in space.features(case))


def cases(seed: int, runtimes: Sequence[str], coverage: Coverage, first: int = 0, with_known: bool = False) -> Iterator[dict[str, Any]]:
    """Endless cases from number `first` on, the same for the same seed and runtimes; of some candidates the one with the rarest pairs."""
    number = 0
    while True:
        runtime = runtimes[number % len(runtimes)]
        draws = (space.draw(seed, number * SPACING + index, [runtime]) for index in range(SPACING))
        candidates = list(itertools.islice((case for case in draws if with_known or not known.why(case)), CANDIDATES))
        best = max(candidates, key=coverage.rarity)
        coverage.add(best)
        if number >= first:
            yield best
        number += 1
