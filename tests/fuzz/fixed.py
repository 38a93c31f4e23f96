"""The fixed set of the default suite: light cases, chosen for the pairs of feature and runtime that they cover.

A drawn job is run on several runtimes, so that its oracle is computed once, and each on all of its data.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from tests.fuzz import known, space
from tests.fuzz.coverage import Coverage

SEED, CANDIDATES = 12, 40
AGAIN = 6  # other data for each graph: to trace one more costs as much as ten of them
REFUSED = {"centered", "max_loss", "running_mean"}
STARTED = ("one_device", "mirrored:2", "sockets:2", "multi_worker:2")  # of those on which a run can go on
# Which runtimes see a job, in turn; of the same kinds of process groups, of which each costs a start.
TURNS = (
    ("mirrored:3", "sockets:2", "one_device"),
    ("fit:2",),
    ("mirrored:2", "mesh:2", "one_device"),
    ("mirrored:3", "mesh:2", "multi_worker:2"),
    ("fit:2",),
    ("mirrored:2", "sockets:2", "mesh:2"),
)
BROKEN_OFF = {2: "resumed", 5: "moved"}  # jobs that are stopped in between


def cases(count: int = 150) -> list[dict[str, Any]]:
    """Always the same ones; `count` with all of their data."""
    coverage, found, left = Coverage(), [], count
    for case in _drawn(coverage):
        if len(space.parts(case)) > left:
            case["again"] = case["again"][: left - 1]
        coverage.draw(case)
        found.append(case)
        left -= len(space.parts(case))
        if not left:
            return found
    raise AssertionError("endless")


def _drawn(coverage: Coverage) -> Iterator[dict[str, Any]]:
    number = 0
    while True:
        light = itertools.islice(_candidates(number), CANDIDATES)
        yield from max(light, key=lambda cases: sum(coverage.rarity(case) for case in cases))
        number += 1


def _candidates(number: int) -> Iterator[list[dict[str, Any]]]:
    """Each a light job on the runtimes whose turn it is."""
    first, *others = TURNS[number % len(TURNS)]
    for draw in itertools.count(number * 1000):
        # More data cost time to be drawn, and most jobs are not light.
        if _light(space.draw(SEED, draw, [first], again=0), BROKEN_OFF.get(number)):
            job = space.draw(SEED, draw, [first], AGAIN)
            if "optimized" not in job and not known.why(job):
                yield [job, *(case for case in space.elsewhere(job, others) if not known.why(case))]


def _light(case: dict[str, Any], broken_off: str | None) -> bool:
    """Whether it is traced and computed fast, and stopped in between in the way that is wanted."""
    blocks = space.flat_blocks(case)
    if (
        REFUSED & set(blocks)
        or "differs" in case["data"]
        or "spectral" in blocks
        and "recompute" in case.get("options", {})
    ):
        return False  # on most runtimes, or always; that shows little
    if len(blocks) > 3 or "lstm" in blocks or "attention" in blocks or case["model"]["inputs"] == "both":
        return False
    if {"moved", "resumed"} & set(case) != ({broken_off} if broken_off else set()) or case.get(
        "moved", STARTED[0]
    ) not in STARTED:
        return False
    if case["kind"] == "fit":
        return (
            "differs_at" not in case["data"]  # after which processes are started anew
            and not {"jit_compile", "steps_per_execution"} & set(case["compile"])
            and case["model"]["head"] != "dict"
            and "validation" not in case["fit"]
        )
    return case["options"]["accumulation"] <= 2 and not case["options"].get("jit_compile")
