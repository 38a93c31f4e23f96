"""The command behind scripts/fuzz.py."""

from __future__ import annotations

import argparse
import json
import time

from tests.fuzz import space
from tests.fuzz.coverage import Coverage, cases
from tests.fuzz.pool import Pool
from tests.fuzz.shrink import script, shrink
from tests.fuzz.verdict import Verdict, judge


def main(argv: list[str]) -> int:
    arguments = _parse(argv)
    pool, begun = Pool(), time.monotonic()
    verdicts: list[Verdict] = []
    coverage = Coverage()
    try:
        if arguments.replay:
            verdicts.append(judge(json.loads(arguments.replay), pool))
            print(json.dumps({"problems": verdicts[0].problems, "refused": verdicts[0].refused, "granted": verdicts[0].rough}, indent=1))
        else:
            for number, case in enumerate(cases(arguments.seed, arguments.runtimes, coverage)):
                if number >= arguments.first + arguments.cases or time.monotonic() - begun > arguments.minutes * 60:
                    break
                if number >= arguments.first:
                    verdicts.append(judge(case, pool))
                    _tell(verdicts[-1], number, arguments, pool)
                    if arguments.until_first and verdicts[-1].bad:
                        break
    finally:
        pool.close()
    return _summary(verdicts, coverage, arguments, time.monotonic() - begun)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fuzz.py")
    parser.add_argument("--minutes", type=float, default=10.0, help="end after so many minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=10**9, help="at most so many")
    parser.add_argument("--first", type=int, default=0, help="number of the first case of this seed")
    parser.add_argument("--runtimes", type=lambda text: [name for name in space.RUNTIMES if any(name.startswith(part) for part in text.split(","))], default=list(space.RUNTIMES), help="names or their beginnings, such as mirrored,fit:2")
    parser.add_argument("--replay", default="", help="one case, as JSON")
    parser.add_argument("--shrink_seconds", type=float, default=60.0, help="for making a failing case smaller; 0: as it is")
    parser.add_argument("--until_first", action="store_true", help="end with the first difference")
    parser.add_argument("--verbose", action="store_true", help="a line for each case")
    parser.add_argument("--table", action="store_true", help="at the end, how often each feature was drawn with each runtime")
    return parser.parse_args(argv)


def _tell(verdict: Verdict, number: int, arguments: argparse.Namespace, pool: Pool) -> None:
    case = verdict.case
    if verdict.bad:
        print(f"\ncase {number} of seed {arguments.seed}: {case['runtime']}\n  " + "\n  ".join(verdict.problems) + f"\n  --replay='{json.dumps(case)}'", flush=True)
        if arguments.shrink_seconds:
            small = shrink(verdict, lambda smaller: judge(smaller, pool), arguments.shrink_seconds)
            print("  smaller:\n  " + "\n  ".join(small.problems) + f"\n  --replay='{json.dumps(small.case)}'\n\n{script(small.case)}", flush=True)
    elif arguments.verbose:
        print(f"case {number}: {case['runtime']:15s} {verdict.seconds:5.2f} s, granted {verdict.rough:.1e}, {' '.join(space.features(case))} {verdict.refused}", flush=True)
    elif number % 50 == 49:
        print(f"{number + 1} cases", flush=True)


def _summary(verdicts: list[Verdict], coverage: Coverage, arguments: argparse.Namespace, seconds: float) -> int:
    bad = [verdict for verdict in verdicts if verdict.bad]
    counts = {name: sum(verdict.case["runtime"] == name for verdict in verdicts) for name in space.RUNTIMES}
    print(f"{len(verdicts)} cases in {seconds:.0f} s ({', '.join(f'{name} {count}' for name, count in counts.items() if count)}): "
          f"{len(bad)} with a difference, {sum(bool(verdict.refused) for verdict in verdicts)} refused, {sum(verdict.rough > 1e-3 for verdict in verdicts)} too rough to tell much")
    if not arguments.replay:
        missing = coverage.missing(arguments.runtimes)
        print(f"{len(coverage.pairs)} pairs of feature and runtime drawn; {len(missing)} that are allowed less than five times" + (f", for example {list(missing)[:5]}" if missing else ""))
        if arguments.table:
            print(coverage.table(arguments.runtimes))
    return int(bool(bad))
