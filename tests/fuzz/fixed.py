"""The fixed set of the default suite: light cases, chosen for the pairs of feature and runtime that they cover.

A drawn job is run on several runtimes, so that its oracle is computed once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from tests.fuzz import known, mesh_space, space
from tests.fuzz.coverage import Coverage

SEED, CANDIDATES = 15, 12
# Which runtimes see a job, in turn; of the same kinds of process groups, of which each costs a start.
TURNS = (("one_device", "mirrored:2", "sockets:2", "mesh:2", "multi_worker:2"), ("mirrored:2", "sockets:2", "mesh:2"), ("mirrored:3", "mesh:2", "multi_worker:2", "sockets:2"))


def cases(count: int = 150) -> list[dict[str, Any]]:
    """Always the same ones."""
    coverage, found = Coverage(), []
    for number, job in enumerate(_jobs(coverage)):
        for case in [job] if job["kind"] == "fit" else _spread(job, TURNS[number % len(TURNS)]):
            coverage.add(case)
            found.append(case)
        if len(found) >= count:
            return found[:count]
    raise AssertionError("endless")


def _jobs(coverage: Coverage) -> Iterator[dict[str, Any]]:
    number = 0
    while True:
        runtime = "fit:2" if number % 3 == 2 else "mirrored:3"
        candidates: list[dict[str, Any]] = []
        draws = 0
        while len(candidates) < CANDIDATES:
            case = space.draw(SEED, number * 1000 + draws, [runtime])
            draws += 1
            if _light(case) and not known.why(case):
                candidates.append(case)
        chosen = max(candidates, key=coverage.rarity)
        yield chosen if number % 2 == 0 or chosen["kind"] == "fit" else {**chosen, "evaluate": False}  # which is to trace another graph
        number += 1


def _light(case: dict[str, Any]) -> bool:
    """Whether it is traced and computed fast."""
    blocks = space.flat_blocks(case)
    if len(blocks) > 2 or "lstm" in blocks or "attention" in blocks or case["model"]["inputs"] == "both" or "moved" in case or "resumed" in case:
        return False
    if case["kind"] == "fit":
        return not {"jit_compile", "steps_per_execution"} & set(case["compile"]) and case["model"]["head"] != "dict" and "validation" not in case["fit"]
    return case["options"]["accumulation"] <= 2 and not case["options"].get("jit_compile")


def _spread(job: dict[str, Any], runtimes: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    chance = random.Random(job["seed"])
    for runtime in runtimes:
        case = {**job, "runtime": runtime, "options": dict(job["options"])}
        if runtime.startswith("mesh") and mesh_space.can_shard(case):
            case["options"]["zero"] = chance.choice([0, 1, 2, 3])
        if not space.conflicts(case) and not known.why(case):
            yield case
