"""The fixed set of the default suite: cheap cases, chosen for the (feature, runtime) pairs that they cover.

A drawn job runs on several runtimes, so that its oracle is computed once, and on each with all of its data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.fuzz import known, resume_space, space
from tests.fuzz.coverage import Coverage, pairs_of

SEED, CANDIDATES = 15, 12
STARTED = ("one_device", "mirrored:2", "sockets:2", "multi_worker:2")  # those of space.MOVABLE whose groups run anyway
# The runtimes that run each job, in turn. They share a few process groups, since each group takes time to start.
TURNS = (
    ("mirrored:3", "sockets:2", "one_device"),
    ("fit:2",),
    ("mirrored:2", "mesh:2", "one_device"),
    ("mirrored:3", "mesh:2", "multi_worker:2"),
    ("fit:2",),
    ("mirrored:2", "sockets:2", "mesh:2"),
)
BROKEN_OFF = {2: "resumed", 5: "moved"}  # number of a job -> how it is interrupted


_DATA = {"size": 20, "source": "arrays", "weights": "none"}
_ROWS = {"inputs": "rows", "blocks": ["dense"], "head": "classes"}
_OPTIONS = {"accumulation": 1, "global_batch": 4, "learning_rate": 0.1, "optimizer": "momentum"}
_TRAIN = {"kind": "train", "seed": 5, "model": _ROWS, "data": _DATA, "options": _OPTIONS, "evaluate": False}
_ROLLED = {"save_every": 2, "log_every": 1, "stop": 3, "max_rollbacks": 3}
# What may happen to a run before its end, in addition to what the drawn jobs cover: each once, as small as possible.
BETWEEN = [
    # NaN in step 4. The run is asked to stop after step 2, so it has a snapshot of step 3, where an uninterrupted run
    # has a backup.
    {
        **_TRAIN,
        "runtime": "one_device",
        "data": {**_DATA, "nan": 15},
        "options": {**_OPTIONS, "shuffle": False},
        "calls": [5],
        "rolled": {**_ROLLED, "save_every": 4, "stop": 2, "backup_every": 1, "log_every": 5},
    },
    # The evaluations at steps 2 and 4 (the first, and one in between) give NaN; the uninterrupted run has slow steps.
    {
        **_TRAIN,
        "runtime": "one_device",
        "calls": [7],
        "rolled": {**_ROLLED, "keep_best": "min:loss", "eval_every": 2, "nan_evaluations": [2, 4], "slow": True},
    },
    {**_TRAIN, "runtime": "one_device", "calls": [3, 2], "changed": {"batch": 6, "allowed": True}},
    {**_TRAIN, "runtime": "one_device", "calls": [3, 2], "changed": {"batch": 6, "allowed": False}},
    {
        **_TRAIN,
        "runtime": "mesh:2",
        "options": {**_OPTIONS, "compression": "int8", "compression_after": 0},
        "calls": [1, 1],
        "changed": {"compression": "none", "allowed": True},
    },
    # A plain fit that is killed twice: in its second epoch, and again in what goes on from there.
    {
        "kind": "fit",
        "seed": 5,
        "runtime": "fit:1",
        "model": {**_ROWS, "blocks": ["batch_norm", "draws"]},
        "data": _DATA,
        "compile": {"optimizer": "adam", "learning_rate": 0.01, "loss": "entropy", "metrics": ["accuracy"]},
        "fit": {
            "batch_size": 6,
            "epochs": 3,
            "shuffle": True,
            "callbacks": ["ledger", "early_stopping"],
            "plain_backup": {"save_freq": 1, "double": True, "kills": [16, 7], "kills_first": False, "place": "first"},
        },
    },
]


def cases() -> list[dict[str, Any]]:
    """Returns always the same cases: the drawn ones, but of their data only those that bring a (feature, runtime) pair
    which none before them has. Others would show the same, once more.
    """
    found: list[dict[str, Any]] = []
    covered: set[tuple[str, str]] = set()
    for case in drawn():
        first, *others = space.parts(case)
        covered.update(pairs_of(first))
        again = []
        for other in others:
            if not covered.issuperset(pairs_of(other)):
                again.append(other["data"])
                covered.update(pairs_of(other))
        found.append(
            {name: value for name, value in case.items() if name != "again"} | ({"again": again} if again else {})
        )
    return found


def drawn(count: int = 150) -> list[dict[str, Any]]:
    """Returns always the same `count` drawn cases, where each set of data counts."""
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
        first, *others = TURNS[number % len(TURNS)]
        candidates: list[dict[str, Any]] = []
        draws = 0
        while len(candidates) < CANDIDATES:
            case = space.draw(SEED, number * 1000 + draws, [first])
            draws += 1
            if _light(case, BROKEN_OFF.get(number)) and not known.why(case):
                candidates.append(case)
        job = max(candidates, key=coverage.rarity)
        yield job
        yield from (case for case in space.elsewhere(job, others) if not known.why(case))
        number += 1


def _light(case: dict[str, Any], broken_off: str | None) -> bool:
    """Whether a case is fast to trace and compute, and is interrupted in the way that is wanted."""
    blocks = space.flat_blocks(case)
    if "spectral" in blocks and "recompute" in case.get("options", {}):  # is refused, so it shows little
        return False
    if (
        len(blocks) > 2
        or "lstm" in blocks
        or "attention" in str(blocks)
        or case["model"]["inputs"] == "both"
        or {"optimized", "gpu", *resume_space.KEYS} & set(case)
    ):
        return False
    if {"moved", "resumed"} & set(case) != ({broken_off} if broken_off else set()) or case.get(
        "moved", STARTED[0]
    ) not in STARTED:
        return False
    if case["kind"] == "fit":
        return (
            "differs_at" not in case["data"]  # after which processes must be restarted
            and not {"jit_compile", "steps_per_execution"} & set(case["compile"])
            and case["model"]["head"] != "dict"
            and "validation" not in case["fit"]
        )
    return case["options"]["accumulation"] <= 2 and not case["options"].get("jit_compile")
