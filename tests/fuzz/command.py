"""The command behind scripts/fuzz.py."""

from __future__ import annotations

import argparse
import json
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from tests.fuzz import space
from tests.fuzz.pool import Pool
from tests.fuzz.verdict import Verdict, judge


def main(argv: list[str]) -> int:
    arguments = _parse(argv)
    pool, deadline = Pool(), time.monotonic() + arguments.minutes * 60
    verdicts: list[Verdict] = []
    try:
        if arguments.replay:
            verdicts.append(judge(json.loads(arguments.replay), pool))
            _tell(verdicts[-1], 0)
        else:
            for number in range(arguments.first, arguments.first + arguments.cases):
                if time.monotonic() > deadline:
                    break
                verdicts.append(judge(space.draw(arguments.seed, number, arguments.runtimes), pool))
                _tell(verdicts[-1], number, arguments.verbose)
    finally:
        pool.close()
    bad = [verdict for verdict in verdicts if verdict.bad]
    print(f"{len(verdicts)} cases, {len(bad)} with a difference, {sum(bool(v.refused) for v in verdicts)} refused; "
          f"{sum(v.seconds for v in verdicts) / max(len(verdicts), 1):.2f} s a case")
    return int(bool(bad))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fuzz.py")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=10**9, help="at most so many")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--runtimes", type=lambda text: text.split(","), default=list(space.RUNTIMES))
    parser.add_argument("--replay", default="", help="a case as JSON")
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args(argv)


def _tell(verdict: Verdict, number: int, verbose: bool = False) -> None:
    case = verdict.case
    if verdict.bad:
        print(f"\ncase {number}: {case['runtime']}\n  " + "\n  ".join(verdict.problems) + f"\n  --replay='{json.dumps(case)}'", flush=True)
    elif verbose:
        print(f"case {number}: {case['runtime']:15s} {verdict.seconds:5.2f} s, granted {verdict.rough:.1e}, {' '.join(space.features(case))} {verdict.refused}", flush=True)
