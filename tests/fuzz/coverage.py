"""Which pairs of (feature, runtime) were drawn and compared, and cases chosen so that rare pairs come soon.

A case is one set of data: a graph that is run on five of them is five cases. So are pairs counted: a feature of a model
or of its options once for each set of data on which it was compared, one of the data once for each that has it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.fuzz import known, models, space

CANDIDATES, NEW = 1500, 50  # cases of a runtime to choose from, at first and more for each that was chosen
LEAST = 5  # so often a pair should have been compared
LOOKED_AT = 2000  # cases of each runtime
LONGEST = 5  # blocks of a model to which others are added because they are rare
ELSEWHERE = 5  # other runtimes that see the same job, for which the oracle is computed once


class Coverage:
    """Counts of what was compared. file: to which they are added at the end of a run, and from which the next one goes
    on.

    Attributes: pairs, counted as said above; graphs, the same but once for each graph; drawn, in how many graphs pairs
    were chosen, whatever came of them.
    """

    def __init__(self, file: str = ""):
        self.pairs: Counter[tuple[str, str]] = Counter()
        self.graphs: Counter[tuple[str, str]] = Counter()
        self.runtimes: Counter[str] = Counter()
        self.file = Path(file) if file else None
        if self.file and self.file.exists():
            told = json.loads(self.file.read_text())
            self.runtimes.update(told["runtimes"])
            for name in ("pairs", "graphs"):
                getattr(self, name).update({tuple(pair.split(" on ")): count for pair, count in told[name].items()})
        self.drawn, self.drawn_parts = Counter(self.graphs), Counter(self.pairs)
        self._worth: dict[tuple[str, str], float] = {}  # of pairs whose counts have not changed since

    def write(self) -> None:
        if self.file:
            told = {
                name: {" on ".join(pair): count for pair, count in sorted(getattr(self, name).items())}
                for name in ("pairs", "graphs")
            }
            self.file.write_text(json.dumps({"runtimes": dict(sorted(self.runtimes.items())), **told}, indent=0))

    def draw(self, case: Mapping[str, Any]) -> None:
        pairs = pairs_of(case)
        self.drawn.update(pairs)
        self.drawn_parts.update(pair for part in space.parts(case) for pair in pairs_of(part))
        for pair in pairs:
            self._worth.pop(pair, None)

    def add(self, case: Mapping[str, Any]) -> None:
        """Of a case that was as its oracle, or refused as it should be."""
        self.runtimes[case["runtime"]] += len(space.parts(case))
        self.graphs.update(pairs_of(case))
        self.pairs.update(pair for part in space.parts(case) for pair in pairs_of(part))

    def rarity(self, case: Mapping[str, Any]) -> float:
        """How much a case adds: the rarer its pairs are so far, the more."""
        return self.rarity_of(pairs_of(case))

    def rarity_of(self, pairs: Iterable[tuple[str, str]]) -> float:
        worth, total = self._worth, 0.0
        for pair in pairs:
            if pair not in worth:
                worth[pair] = 4.0 ** -self.drawn[pair] + (self.drawn_parts[pair] < LEAST)
            total += worth[pair]
        return total

    def missing(self, runtimes: Sequence[str], least: int = LEAST, drawn: bool = False) -> dict[tuple[str, str], int]:
        """Pairs that can be drawn but were compared less often than `least`; drawn: or chosen to be."""
        counts = self.drawn_parts if drawn else self.pairs
        return {pair: counts[pair] for pair in sorted(allowed_pairs(tuple(runtimes))) if counts[pair] < least}

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


def pairs_of(case: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(feature, case["runtime"]) for feature in space.features(case)]


@cache
def allowed_pairs(runtimes: tuple[str, ...]) -> frozenset[tuple[str, str]]:
    """All pairs that can be drawn, found by drawing; of more data for a graph no others come."""
    return frozenset(
        (feature, case["runtime"])
        for number in range(LOOKED_AT * len(runtimes))
        for case in [space.draw_stored(-1, number, runtimes, again=0)]
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
    """Endless cases from job `first` on, the same for the same seed, runtimes and counts.

    Of some candidates the one with the rarest pairs, in turn of a runtime and of the one that lacks most of them; where
    nothing lacks, every other one as it is drawn.
    """
    candidates = {name: _Candidates(seed, name, runtimes, again, with_known) for name in runtimes}
    number = 0
    while True:
        runtime = runtimes[number // 2 % len(runtimes)]
        lacking = Counter(name for _, name in coverage.missing(runtimes, drawn=True))
        if number % 2 and lacking:
            runtime = max(runtimes, key=lambda name: lacking[name])
        best = candidates[runtime].best(coverage, rarest=number % 2 == 1 or bool(lacking))
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


class _Candidates:
    """Drawn cases of a runtime, from which the rarest is taken each time."""

    def __init__(self, seed: int, runtime: str, runtimes: Sequence[str], again: int, with_known: bool):
        self._seed, self._runtime, self._again, self._with_known = seed, runtime, again, with_known
        self._there = {name for name in space.MOVABLE if name in runtimes and name != runtime}
        self._drawn, self._cases = 0, []

    def best(self, coverage: Coverage, rarest: bool) -> dict[str, Any]:
        for _ in range(NEW if self._cases else CANDIDATES):
            case = space.draw_stored(self._seed, self._drawn, [self._runtime], self._again)
            self._drawn += 1
            # Where one of the runtimes can go on with a run no other processes are started for that.
            elsewhere = self._there and case.get("moved", "") not in {"", *self._there}
            if (self._with_known or not known.why(case)) and not elsewhere:
                self._cases.append((case, pairs_of(case)))
        if not rarest:
            return self._cases.pop(0)[0]
        index = max(range(len(self._cases)), key=lambda each: coverage.rarity_of(self._cases[each][1]))
        return self._longer(self._cases.pop(index)[0], coverage)

    def _longer(self, case: dict[str, Any], coverage: Coverage) -> dict[str, Any]:
        """With the blocks that were compared too rarely, as far as they go together; not where the job is refused."""
        if models.MIXING & set(space.flat_blocks(case)) or "differs" in case["data"]:
            return case
        counts = {name: coverage.drawn_parts[f"block:{name}", self._runtime] for name in models.BLOCKS}
        for name in sorted(
            (name for name in counts if counts[name] < LEAST and name not in models.MIXING), key=counts.get
        ):
            longer = space.with_block(case, name) if len(space.flat_blocks(case)) < LONGEST else None
            if longer and name not in space.flat_blocks(case) and (self._with_known or not known.why(longer)):
                case = longer
        return case
