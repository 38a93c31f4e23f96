"""The command behind scripts/mistakes.py."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.mistakes import judge, modules
from tests.mistakes.fixed import FIXED
from tests.mistakes.mistake import Mistake
from tests.mistakes.mutations import draw
from tests.mistakes.runner import Outcome, Runner

USUAL = {*modules.TRAIN, *modules.MINE.splitlines(), *modules.SCRIPT.splitlines()}


@dataclass(frozen=True)
class Verdict:
    """The result of one mistake."""

    name: str  # "seed 1, number 3"
    mistake: Mistake
    outcomes: list[Outcome]
    problems: list[str]

    @property
    def result(self) -> str:
        return (
            "problem"
            if self.problems
            else " ".join(str(code) for code in sorted({outcome.code or 0 for outcome in self.outcomes}, reverse=True))
        )


def examine(name: str, mistake: Mistake, runner: Runner, fresh: bool = False) -> Verdict:
    outcomes = runner.run(mistake, fresh)
    if mistake.plain:
        alone = runner.run(mistake, alone=True)
        return Verdict(name, mistake, [*outcomes, *alone], judge.problems_of_script(outcomes, alone))
    return Verdict(name, mistake, outcomes, judge.problems(mistake, outcomes))


def main(argv: list[str]) -> int:
    arguments = _parse(argv)
    chosen = [tuple(map(int, entry.split(":"))) for entry in arguments.only.split(",") if entry] or [
        (arguments.seed, arguments.first + number) for number in range(arguments.count)
    ]
    cases = (
        [(f"fixed {seed}:{number}", seed, number) for seed, number in FIXED]
        if arguments.fixed
        else [(f"{seed}:{number}", seed, number) for seed, number in chosen]
    )
    runner, begun, verdicts = Runner(), time.monotonic(), []
    try:
        for count, (name, seed, number) in enumerate(cases):
            mistake = draw(seed, number)
            if arguments.kind not in mistake.kind:
                continue
            fresh = bool(arguments.fresh_every) and count % arguments.fresh_every == 0
            verdicts.append(examine(name, mistake, runner, fresh))
            _tell(verdicts[-1], fresh, arguments)
    finally:
        runner.close()
    return _summary(verdicts, time.monotonic() - begun)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mistakes.py")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first of this seed")
    parser.add_argument("--only", default="", help="SEED:NUMBER,..., instead")
    parser.add_argument("--kind", default="", help="of these only those whose kind has this in its name")
    parser.add_argument("--fixed", action="store_true", help="those of the default suite")
    parser.add_argument(
        "--fresh_every", type=int, default=0, help="every so many is run in processes of its own, as a user would"
    )
    parser.add_argument("--log", default="", help="file to which everything is added, for reading")
    parser.add_argument("--verbose", action="store_true", help="a line for each, and its output")
    return parser.parse_args(argv)


def _tell(verdict: Verdict, fresh: bool, arguments: argparse.Namespace) -> None:
    mistake = verdict.mistake
    ends = "; ".join(f"{outcome.code}: {judge.sentence(outcome) or '-'}" for outcome in verdict.outcomes)
    used = sum(outcome.processor_seconds for outcome in verdict.outcomes)
    lines = [
        f"{verdict.name} {mistake.kind}{' (fresh)' if fresh else ''}: {mistake.describe(USUAL)}",
        f"    {used:.1f} s -> {ends}",
        *(f"    PROBLEM {problem}" for problem in verdict.problems),
    ]
    outputs = (
        [f"--- process {index}\n{outcome.output[-6000:]}" for index, outcome in enumerate(verdict.outcomes)]
        if verdict.problems or arguments.verbose
        else []
    )
    if arguments.log:
        with Path(arguments.log).open("a", errors="backslashreplace") as file:
            file.write("\n".join([*lines, *outputs]) + "\n")
    if verdict.problems or arguments.verbose:
        print(
            "\n".join([*lines, *(outputs if arguments.verbose else [])]).encode(errors="backslashreplace").decode(),
            flush=True,
        )


def _summary(verdicts: list[Verdict], seconds: float) -> int:
    table = Counter((verdict.mistake.kind.partition(":")[0], verdict.result) for verdict in verdicts)
    for (kind, result), count in sorted(table.items()):
        print(f"{count:5d}  {kind:34s} {result}")
    bad = sum(bool(verdict.problems) for verdict in verdicts)
    used = sum(outcome.processor_seconds for verdict in verdicts for outcome in verdict.outcomes)
    print(f"{len(verdicts)} mistakes in {seconds:.0f} s ({used:.0f} s of a core): {bad} with a problem")
    return int(bool(bad))
