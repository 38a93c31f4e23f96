"""What came of a case: the answers of its workers beside the oracle."""

from __future__ import annotations

import json
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

Arrays = dict[str, np.ndarray]

COMPRESSED = 0.02  # of the largest value: gradients that travel as bfloat16 keep 8 bits

# What tfdist may refuse to do: (error class, pattern of the sentence). All else that it refuses is a failure.
ALLOWED_REFUSALS = (
    ("ConfigError", r"leaves some of \d+ replicas x \d+ micro-batches empty"),
    ("ConfigError", r"layer \w*spectral\w* sets its weight \S+ in the forward pass"),
    ("ConfigError", r"--mesh has pipe=, whose stages hand on one tensor"),
    ("ConfigError", r"--jit_compile cannot compile synchronised BatchNormalization over several replicas"),
    ("ConfigError", r"--strategy=multi_worker: TensorFlow cannot send the bfloat16 variable"),
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
    begun = time.monotonic()
    verdict = conclude(case, answers_of(case, pool))
    verdict.seconds = time.monotonic() - begun
    return verdict


def answers_of(case: Mapping[str, Any], pool: Pool) -> list[dict[str, Any]]:
    """What all ranks answer; of a case that is moved, those of the second runtime with what the first one told."""
    if "moved" not in case:
        return pool.run(dict(case))
    with tempfile.TemporaryDirectory(prefix="tfdist-fuzz-") as folder:
        before = pool.run({**case, "phase": {"save": folder}})
        if any("arrays" not in answer for answer in before):
            return before
        options = {name: value for name, value in case["options"].items() if name not in MESH_ONLY}
        answers = pool.run({**case, "runtime": case["moved"], "phase": {"load": folder}, "options": options})
    return [{**answer, "arrays": {**before[0]["arrays"], **answer["arrays"]}} if "arrays" in answer else answer for answer in answers]


def conclude(case: Mapping[str, Any], answers: list[dict[str, Any]]) -> Verdict:
    """Computes the oracle, and compares."""
    verdict = Verdict(case)
    if not _answered(verdict, answers):
        if case["kind"] == "fit" and (why := _refused_by_keras(case)):
            return Verdict(case, refused=why)
        return verdict
    try:
        single, double = references(case)
    except Exception as error:
        if case["kind"] != "fit":
            raise
        # Keras itself does not take this case, whatever tfdist makes of it.
        verdict.refused = f"Keras: {type(error).__name__}: {str(error)[:200]}"
        return verdict
    verdict.problems += [problem for answer in answers for problem in answer.get("problems", [])]
    _compare_replicas(verdict, answers)
    silent = _not_told(case)
    single, double = ({name: value for name, value in run.items() if not name.startswith(silent)} if silent else run for run in (single, double))
    least = COMPRESSED if "compression" in case.get("options", {}) else 0.0
    bounds = compare.granted(single, double, least)
    found = compare.differences(answers[0]["arrays"], single, double, bounds)
    if found and case["kind"] == "train":  # perhaps this case is one that doubles rounding errors: look at another order of adding
        turned, _ = references(case, turned=True)
        more = compare.granted({name: turned[name] for name in double}, double, least)
        bounds = {name: max(bound, more[name]) for name, bound in bounds.items()}
        found = compare.differences(answers[0]["arrays"], single, double, bounds)
    verdict.rough = max((bound for name, bound in bounds.items() if name.startswith("model/")), default=0.0)
    verdict.problems += [str(difference) for difference in sorted(found, key=lambda difference: -difference.by / difference.granted)[:4]]
    return verdict


def _refused_by_keras(case: Mapping[str, Any]) -> str:
    """What plain Keras says to a case that it does not take either; "" if it does."""
    import keras

    from tests.fuzz import fit_case

    try:
        fit_case.run(case, keras.Model)
    except Exception as error:
        return f"Keras: {type(error).__name__}: {str(error)[:200]}"
    return ""


def _not_told(case: Mapping[str, Any]) -> tuple[str, ...]:
    """Beginnings of the names of what cannot be compared with the oracle."""
    if "dropout" in str(case["model"]["blocks"]):  # it has other masks
        return ("model/", "loss/", "norm/", "eval/", "skipped")
    if case["runtime"].startswith("parameter_server"):
        return ("norm/", "loss/", "skipped")
    return (*(("skipped",) if "moved" in case else ()), *(() if case.get("evaluate", True) else ("eval/",)))


def _compare_replicas(verdict: Verdict, answers: list[dict[str, Any]]) -> None:
    digests = [digest for answer in answers for digest in answer["replicas"]]
    if len(set(digests)) > 1:
        verdict.problems.append(f"the replicas' weights differ: {[digest[:6] for digest in digests]}")
    for rank, answer in enumerate(answers[1:], 1):
        unlike = [name for name, value in answers[0]["arrays"].items() if name in answer["arrays"] and not np.array_equal(value, answer["arrays"][name], equal_nan=True)]
        if unlike:
            verdict.problems.append(f"rank {rank} has other {', '.join(unlike[:5])} than rank 0")


_known: dict[str, tuple[Arrays, Arrays]] = {}  # the last few, for cases that differ in the runtime alone


def references(case: Mapping[str, Any], turned: bool = False) -> tuple[Arrays, Arrays]:
    """(the oracle in the precision of the case, the oracle in float64)"""
    from tests.fuzz import fit_case, oracle
    from tests.fuzz.data_order import order_of

    parts = {name: case.get(name) for name in ("kind", "seed", "model", "data", "calls", "compile", "fit")}
    options = {name: value for name, value in case.get("options", {}).items() if name not in MESH_ONLY}
    key = json.dumps([parts, options, turned], sort_keys=True)
    if key not in _known:
        while len(_known) >= 4:
            _known.pop(next(iter(_known)))
        _known[key] = fit_case.references(case) if case["kind"] == "fit" else oracle.predict(case, order_of(case), turned)
    return _known[key]


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
