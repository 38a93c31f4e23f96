"""Runs a case on its group of processes and beside it the oracle, and says what came of it."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.fuzz import compare
from tests.fuzz.pool import Pool
from tests.fuzz.space import MESH_ONLY

# What tfdist may refuse to do: (error class, pattern of the sentence). All else that it refuses is a failure.
ALLOWED_REFUSALS = (
    ("ConfigError", r"leaves some of \d+ replicas x \d+ micro-batches empty"),
)


@dataclass
class Verdict:
    """What came of a case."""

    case: Mapping[str, Any]
    problems: list[str] = field(default_factory=list)
    refused: str = ""  # an allowed refusal
    rough: float = 0.0  # the difference that is granted to weights
    seconds: float = 0.0

    @property
    def bad(self) -> bool:
        return bool(self.problems)


def judge(case: Mapping[str, Any], pool: Pool) -> Verdict:
    """Runs one case from beginning to end."""
    verdict, begun = Verdict(case), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tfdist-fuzz-") as folder:
        _judge(verdict, case, pool, folder)
    verdict.seconds = time.monotonic() - begun
    return verdict


def _judge(verdict: Verdict, case: Mapping[str, Any], pool: Pool, folder: str) -> None:
    sent = {**case, "phase": {"save": folder}} if "moved" in case else dict(case)
    pool.send(sent)
    try:
        single, double = references(case)
    except Exception as error:
        if case["kind"] != "fit":
            raise
        pool.receive(sent)  # whatever it is: Keras itself does not take this case
        verdict.refused = f"Keras: {type(error).__name__}: {str(error)[:200]}"
        return
    answers = pool.receive(sent)
    if not _answered(verdict, answers):
        return
    if "moved" in case:
        sent = {**case, "runtime": case["moved"], "phase": {"load": folder}, "options": {name: value for name, value in case["options"].items() if name not in MESH_ONLY}}
        pool.send(sent)
        before, answers = answers, pool.receive(sent)
        if not _answered(verdict, answers):
            return
        for answer in answers:
            answer["arrays"] = {**before[0]["arrays"], **answer["arrays"]}
        single, double = ({name: value for name, value in run.items() if name != "skipped"} for run in (single, double))
    if "dropout" in str(case["model"]["blocks"]):  # with masks of its own the oracle cannot tell
        single, double = {}, {}
    if case["runtime"].startswith("parameter_server"):
        single, double = (_one_interval(case, run) for run in (single, double))
    verdict.problems += [problem for answer in answers for problem in answer.get("problems", [])]
    _compare(verdict, case, answers, single, double)


def _one_interval(case: Mapping[str, Any], run: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Without what parameter servers do not tell in this way."""
    return {name: value for name, value in run.items() if not name.startswith(("norm/", "loss/", "skipped"))}


def _compare(verdict: Verdict, case: Mapping[str, Any], answers: list[dict[str, Any]], single: dict[str, np.ndarray], double: dict[str, np.ndarray]) -> None:
    digests = [digest for answer in answers for digest in answer["replicas"]]
    if len(set(digests)) > 1:
        verdict.problems.append(f"the replicas' weights differ: {[digest[:6] for digest in digests]}")
    for rank, answer in enumerate(answers[1:], 1):
        unlike = [name for name, value in answers[0]["arrays"].items() if not np.array_equal(value, answer["arrays"][name], equal_nan=True)]
        if unlike:
            verdict.problems.append(f"rank {rank} has other {', '.join(unlike[:5])} than rank 0")
    bounds = compare.granted(single, double)
    verdict.rough = max((bound for name, bound in bounds.items() if name.startswith("model/")), default=0.0)
    found = compare.differences(answers[0]["arrays"], single, double, bounds)
    if found and case["kind"] == "train":  # perhaps this case is one that doubles rounding errors: look at another order of adding
        turned, _ = references(case, turned=True)
        bounds = {name: max(bound, compare.granted(turned, double)[name]) for name, bound in bounds.items()}
        found = compare.differences(answers[0]["arrays"], single, double, bounds)
    verdict.problems += [str(difference) for difference in sorted(found, key=lambda difference: -difference.by / difference.granted)[:4]]


def references(case: Mapping[str, Any], turned: bool = False) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(the oracle in the precision of the case, the oracle in float64)"""
    from tests.fuzz import fit_case, oracle
    from tests.fuzz.data_order import order_of

    if case["kind"] == "fit":
        return fit_case.references(case)
    return oracle.predict(case, order_of(case), turned)


def _answered(verdict: Verdict, answers: list[dict[str, Any]]) -> bool:
    """Whether all ranks have trained; if not, why is said."""
    failed = [(rank, answer["failed"]) for rank, answer in enumerate(answers) if "failed" in answer]
    refused = [(answer["refused"], answer["sentence"]) for answer in answers if "refused" in answer]
    if failed:
        verdict.problems.append(f"rank {failed[0][0]} failed:\n{failed[0][1]}")
    elif refused and len(refused) < len(answers):
        verdict.problems.append(f"only some ranks refuse: {refused[0]}")
    elif refused and not allowed(*refused[0]):
        verdict.problems.append(f"refused: {refused[0][0]}: {refused[0][1]}")
    elif refused:
        verdict.refused = refused[0][1]
    return not failed and not refused


def allowed(kind: str, sentence: str) -> bool:
    return any(kind == each and re.search(pattern, sentence) for each, pattern in ALLOWED_REFUSALS)
