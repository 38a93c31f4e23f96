"""Counts which (feature, runtime) pairs were drawn and compared, and chooses cases so that rare pairs come soon.

A case is one set of data: a graph that is run on five sets is five cases. Pairs are counted likewise: a feature of a
model or of its options once for each set of data on which it was compared, a feature of the data once for each set that
has it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.fuzz import known, models, space

CANDIDATES, NEW = 1500, 50  # cases of a runtime to choose from: at the start, and added at each choice
LEAST = 5  # times that each pair should have been compared
LOOKED_AT = 2000  # cases drawn for each runtime to find the pairs that exist
LONGEST = 5  # blocks of a model, up to which rare blocks are appended
ELSEWHERE = 5  # other runtimes that run the same job, whose oracle is computed once


class Coverage:
    """Counts of what was compared. file: holds the counts across runs; it is read here, and `write` saves them to it.

    Attributes: pairs, counted as described above; graphs, the same but once for each graph; drawn, in how many graphs
    each pair was chosen, whatever the outcome.
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
        self._worth: dict[tuple[str, str], float] = {}  # rarity of each pair; removed when its count changes

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
        """Counts a case that matched its oracle, or was refused as it should be."""
        self.runtimes[case["runtime"]] += len(space.parts(case))
        self.graphs.update(pairs_of(case))
        self.pairs.update(pair for part in space.parts(case) for pair in pairs_of(part))

    def rarity(self, case: Mapping[str, Any]) -> float:
        """Returns how much a case would add: the rarer its pairs are so far, the more."""
        return self.rarity_of(pairs_of(case))

    def rarity_of(self, pairs: Iterable[tuple[str, str]]) -> float:
        worth, total = self._worth, 0.0
        for pair in pairs:
            if pair not in worth:
                worth[pair] = 4.0 ** -self.drawn[pair] + (self.drawn_parts[pair] < LEAST)
            total += worth[pair]
        return total

    def missing(self, runtimes: Sequence[str], least: int = LEAST, drawn: bool = False) -> dict[tuple[str, str], int]:
        """Returns the pairs that can be drawn but were compared less often than `least`. drawn: counts all cases that
        were drawn, compared or not.
        """
        counts = self.drawn_parts if drawn else self.pairs
        return {pair: counts[pair] for pair in sorted(allowed_pairs(tuple(runtimes))) if counts[pair] < least}

    def table(self, runtimes: Sequence[str]) -> str:
        """One line per feature, one column per runtime; a dot marks a pair that cannot be drawn."""
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
    """Returns all pairs that can be drawn, found by drawing. More data for a graph would add no pairs."""
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
    """Yields cases endlessly from job `first` on, the same ones for the same seed, runtimes and counts.

    Takes the candidate with the rarest pairs: alternately for each runtime in turn, and for the runtime that lacks most
    pairs. If no pair is lacking, every other case is taken as it was drawn.
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
    """Drawn cases of one runtime; `best` takes one of them, usually the rarest."""

    def __init__(self, seed: int, runtime: str, runtimes: Sequence[str], again: int, with_known: bool):
        self._seed, self._runtime, self._again, self._with_known = seed, runtime, again, with_known
        self._there = {name for name in space.MOVABLE if name in runtimes and name != runtime}
        self._drawn, self._cases = 0, []

    def best(self, coverage: Coverage, rarest: bool) -> dict[str, Any]:
        for _ in range(NEW if self._cases else CANDIDATES):
            case = space.draw_stored(self._seed, self._drawn, [self._runtime], self._again)
            self._drawn += 1
            # If one of the given runtimes can resume a run, do not start the processes of another one for that.
            elsewhere = self._there and case.get("moved", "") not in {"", *self._there}
            if (self._with_known or not known.why(case)) and not elsewhere:
                self._cases.append((case, pairs_of(case)))
        if not rarest:
            return self._cases.pop(0)[0]
        index = max(range(len(self._cases)), key=lambda each: coverage.rarity_of(self._cases[each][1]))
        return self._longer(self._cases.pop(index)[0], coverage)

    def _longer(self, case: dict[str, Any], coverage: Coverage) -> dict[str, Any]:
        """Appends blocks that were compared too rarely, as far as they are compatible; not if the job is refused."""
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
