"""The command behind scripts/fuzz.py."""

from __future__ import annotations

import argparse
import itertools
import json
import time

from tests.fuzz import fixed, gpu_form, space
from tests.fuzz.coverage import LEAST, Coverage, allowed_pairs, cases
from tests.fuzz.fleet import judge_all
from tests.fuzz.pool import Pool
from tests.fuzz.shrink import script, shrink
from tests.fuzz.verdict import Verdict, judge


def main(argv: list[str]) -> int:
    arguments = _parse(argv)
    pool, begun = Pool(environment=gpu_form.ON_GPU if arguments.gpu else {}), time.monotonic()
    verdicts: list[Verdict] = []
    coverage = Coverage(arguments.tally)
    try:
        if arguments.replay:
            verdicts.append(judge(json.loads(arguments.replay), pool))
            print(
                json.dumps(
                    {"problems": verdicts[0].problems, "refused": verdicts[0].refused, "granted": verdicts[0].rough},
                    indent=1,
                )
            )
        else:
            drawn = cases(
                arguments.seed, arguments.runtimes, coverage, arguments.first, arguments.with_known, arguments.again
            )
            chosen = (fixed.cases() + fixed.BETWEEN)[arguments.first :] if arguments.fixed else drawn
            if arguments.gpu:
                chosen = (case for case in chosen if not gpu_form.left_out(case, space.flat_blocks(case)))
            chosen = itertools.takewhile(
                lambda _: time.monotonic() - begun < arguments.minutes * 60, itertools.islice(chosen, arguments.cases)
            )
            for verdict in judge_all(chosen, pool, arguments.at_a_time):
                verdicts.append(verdict)
                if not verdict.vacuous and not verdict.bad:
                    coverage.add(verdict.case)
                    coverage.write()  # so that a run which is killed leaves its counts
                _tell(verdict, len(verdicts), arguments, pool)
                if (
                    arguments.until_first
                    and verdict.bad
                    or sum(each.cpu for each in verdicts) > arguments.core_minutes * 60
                ):
                    break
    finally:
        pool.close()
    return _summary(verdicts, coverage, arguments, time.monotonic() - begun)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fuzz.py")
    parser.add_argument("--minutes", type=float, default=10.0, help="end after so many minutes")
    parser.add_argument(
        "--core_minutes",
        type=float,
        default=1e9,
        help="end after so many minutes of a core, whatever else the machine does",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=10**9, help="at most so many graphs")
    parser.add_argument("--first", type=int, default=0, help="number of the first job of this seed")
    parser.add_argument(
        "--runtimes",
        type=lambda text: [name for name in space.RUNTIMES if any(name.startswith(part) for part in text.split(","))],
        default=list(space.RUNTIMES),
        help="names or their beginnings, such as mirrored,fit:2",
    )
    parser.add_argument("--replay", default="", help="one case, as JSON")
    parser.add_argument("--fixed", action="store_true", help="the fixed set of tests/fuzz/test_fuzz.py")
    parser.add_argument(
        "--with_known", action="store_true", help="draw also what known.py says is wrong and not mended yet"
    )
    parser.add_argument(
        "--tally", default="", help="a file of counts: what is rare in it is drawn first, and what was drawn is added"
    )
    parser.add_argument(
        "--again", type=int, default=space.AGAIN, help="other data for the graph of a case, at most: they cost little"
    )
    _add_ways_to_run(parser)
    return parser.parse_args(argv)


def _add_ways_to_run(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that change no case."""
    parser.add_argument(
        "--shrink_seconds", type=float, default=60.0, help="for making a failing case smaller; 0: as it is"
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="workers of one_device, fit:1 and fit_ring:2 compute on this machine's GPU, the oracle on the CPU",
    )
    parser.add_argument("--until_first", action="store_true", help="end with the first difference")
    parser.add_argument("--at_a_time", type=int, default=2, help="cases under way in groups of processes")
    parser.add_argument("--verbose", action="store_true", help="a line for each case")
    parser.add_argument(
        "--table", action="store_true", help="at the end, how often each feature was drawn with each runtime"
    )


def _tell(verdict: Verdict, number: int, arguments: argparse.Namespace, pool: Pool) -> None:
    case = verdict.case
    if verdict.bad:
        print(
            f"\nseed {arguments.seed}, after {number} cases: {case['runtime']}\n  "
            + "\n  ".join(verdict.problems)
            + f"\n  --replay='{json.dumps(case)}'",
            flush=True,
        )
        if arguments.shrink_seconds:
            small = shrink(verdict, lambda smaller: judge(smaller, pool), arguments.shrink_seconds)
            print(
                "  smaller:\n  "
                + "\n  ".join(small.problems)
                + f"\n  --replay='{json.dumps(small.case)}'\n\n{script(small.case)}",
                flush=True,
            )
    elif arguments.verbose:
        print(
            f"case {number}: {case['runtime']:15s} {verdict.cpu:5.2f} s, granted {verdict.rough:.1e},"
            f" {' '.join(space.features(case))} {verdict.refused}",
            flush=True,
        )
    elif number % 50 == 0:
        print(f"{number} cases", flush=True)


def _summary(verdicts: list[Verdict], coverage: Coverage, arguments: argparse.Namespace, seconds: float) -> int:
    bad = [verdict for verdict in verdicts if verdict.bad]
    counts = {
        name: sum(
            len(space.parts(verdict.case))
            for verdict in verdicts
            if verdict.case["runtime"] == name and not verdict.vacuous
        )
        for name in space.RUNTIMES
    }
    print(
        f"{sum(counts.values())} cases, of {len(verdicts)} traced graphs, in {seconds:.0f} s"
        f" ({', '.join(f'{name} {count}' for name, count in counts.items() if count)}): {len(bad)} with a difference,"
        f" {sum(bool(verdict.refused) for verdict in verdicts)} refused"
        f" ({sum(verdict.vacuous for verdict in verdicts)} by plain Keras, too, which are not counted),"
        f" {sum(verdict.rough > 1e-3 for verdict in verdicts)} too rough to tell much"
    )
    spent = {name: [verdict.cpu for verdict in verdicts if verdict.case["runtime"] == name] for name in space.RUNTIMES}
    print(
        f"{sum(map(sum, spent.values())) / max(sum(counts.values()), 1):.2f} seconds of a core a case"
        f" ({', '.join(f'{name} {sum(each) / max(counts[name], 1):.2f}' for name, each in spent.items() if each)})"
    )
    if not arguments.replay:
        coverage.write()
        missing, few = coverage.missing(arguments.runtimes), coverage.missing(arguments.runtimes, least=1)
        print(
            f"{sum(coverage.runtimes.values())} cases in the tally; of {len(allowed_pairs(tuple(arguments.runtimes)))}"
            f" pairs of feature and runtime that can be drawn {len(missing)} were compared less than {LEAST} times"
            f" ({len(few)} never)" + (f", for example {list(missing)[:5]}" if missing else "")
        )
        if arguments.table:
            print(coverage.table(arguments.runtimes))
    return int(bool(bad))
