"""Judges a case: compares the answers of its workers with the oracle."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.fuzz import compare, refusals, space
from tests.fuzz.pool import Pool
from tests.fuzz.resume_space import LOSSY
from tests.fuzz.space import MESH_ONLY

Arrays = dict[str, np.ndarray]

HALF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # the last place, relative to the largest value
COMPRESSED = 0.02  # relative to the largest value: gradients that travel as bfloat16 keep 8 bits


@dataclass
class Verdict:
    """The result of a case."""

    case: Mapping[str, Any]
    problems: list[str] = field(default_factory=list)
    refused: str = ""  # an allowed refusal
    vacuous: bool = False  # plain Keras rejects the case, so nothing was compared
    rough: float = 0.0  # the difference that is granted to weights
    cpu: float = 0.0  # core seconds of all ranks and the oracle

    @property
    def bad(self) -> bool:
        return bool(self.problems)


def judge(case: Mapping[str, Any], pool: Pool) -> Verdict:
    """Runs one case from beginning to end."""
    return conclude(case, answers_of(case, pool))


def answers_of(case: Mapping[str, Any], pool: Pool) -> list[dict[str, Any]]:
    """Returns the answers of all ranks. For a case that is moved: those of the second runtime, with the arrays of the
    first one added.
    """
    if "moved" not in case:
        return pool.run(dict(case))
    with tempfile.TemporaryDirectory(prefix="tfdist-fuzz-") as folder:
        before = pool.run({**case, "phase": {"save": folder}})
        if any("parts" not in answer for answer in before):
            return before
        options = {name: value for name, value in case["options"].items() if name not in MESH_ONLY}
        answers = pool.run({**case, "runtime": case["moved"], "phase": {"load": folder}, "options": options})
    for part in (part for answer in answers for part in answer.get("parts", ())):
        part["arrays"] = {**before[0]["parts"][0]["arrays"], **part["arrays"]}
    return answers


def conclude(case: Mapping[str, Any], answers: list[dict[str, Any]]) -> Verdict:
    """Computes the oracle and compares the answers with it."""
    begun = time.process_time()
    verdict = _compared(case, answers)
    verdict.cpu = time.process_time() - begun + sum(answer.get("cpu", 0.0) for answer in answers)
    return verdict


def _compared(case: Mapping[str, Any], answers: list[dict[str, Any]]) -> Verdict:
    verdict = Verdict(case)
    if (refusal := refusals.demanded(case)) is not None:
        return _refused_as_demanded(verdict, refusal, answers)
    if not _answered(verdict, answers):
        if case["kind"] == "fit" and (why := _refused_by_keras(case)):
            return Verdict(case, refused=why, vacuous=True)
        return verdict
    try:
        expected = doubles(case)
    except Exception as error:
        if case["kind"] != "fit":
            raise
        # Keras itself rejects this case, whatever tfdist does with it.
        verdict.refused, verdict.vacuous = f"Keras: {type(error).__name__}: {str(error)[:200]}", True
        return verdict
    for number, part in enumerate(space.parts(case)):
        problems, rough = _compare_part(
            part,
            [answer["parts"][number] for answer in answers],
            expected[number],
            lambda kind, number=number, part=part: runs_of(kind, case, number, part),
        )
        verdict.problems += [f"with data {number}: {problem}" if number else problem for problem in problems]
        verdict.rough = max(verdict.rough, rough)
    return verdict


def _refused_as_demanded(verdict: Verdict, refusal: refusals.Refusal, answers: list[dict[str, Any]]) -> Verdict:
    told = [(answer.get("refused", ""), answer.get("sentence", "")) for answer in answers]
    said = [refusal.is_said(*each) or refusals.allowed(verdict.case, *each) for each in told]
    # A rank that finds a difference in the middle of a step closes its connections: others may report that it is gone.
    if any(said) and all(said if not refusals.breaks_off(verdict.case) else [error for error, _ in told]):
        verdict.refused = next(sentence for each, (_, sentence) in zip(said, told, strict=True) if each)
        return verdict
    failed = [answer["failed"] for answer in answers if "failed" in answer]
    verdict.problems.append(
        f"should be refused ({refusal.error}: {refusal.sentence}), but the ranks say {told}"
        + (f" and rank failed:\n{failed[0]}" if failed else "")
    )
    return verdict


def _compare_part(
    case: Mapping[str, Any],
    answers: list[dict[str, Any]],
    double: Arrays,
    runs_of: Callable[[str], list[Arrays]],
) -> tuple[list[str], float]:
    """Returns (what is wrong with one of the case's data, the difference that is granted to weights). double: the
    oracle in float64; runs_of: kind -> runs, see the function of that name.
    """
    problems = [problem for answer in answers for problem in answer.get("problems", [])] + _unlike_replicas(answers)
    silent = _not_told(case)
    double = {name: value for name, value in double.items() if not silent or not name.startswith(silent)}
    told = answers[0]["arrays"]
    options = case.get("options") or case["compile"]
    least = COMPRESSED if "compression" in options else HALF.get(options.get("precision", ""), 0.0)
    bounds = compare.least_granted(double, least)
    found = compare.differences(told, double, double, bounds)
    if found:  # rare: most cases are within these bounds
        [single] = runs = runs_of("single")
        bounds = compare.granted(single, double, least)
        found = compare.differences(told, single, double, bounds)
        for kind in ("some", "more"):
            if found:  # perhaps this case amplifies rounding errors
                runs = runs + runs_of(kind)
                bounds = compare.granted_by(runs, double, bounds)
                found = compare.differences(told, single, double, bounds)
    problems += [
        str(difference)
        for difference in sorted(found, key=lambda difference: -difference.by / max(difference.granted, 1e-30))[:4]
    ]
    return problems, max(
        (float(np.median(bound)) for name, bound in bounds.items() if name.startswith("model/") and np.size(bound)),
        default=0.0,
    )


def _refused_by_keras(case: Mapping[str, Any]) -> str:
    """Returns the error of plain Keras for a case that it rejects, too; "" if it accepts the case."""
    import keras

    from tests.fuzz import fit_case

    try:
        fit_case.run(case, keras.Model)
    except Exception as error:
        return f"Keras: {type(error).__name__}: {str(error)[:200]}"
    return ""


def _not_told(case: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the prefixes of the names that cannot be compared with the oracle."""
    # The oracle cannot compute what a compression loses.
    lossy = case.get("options", {}).get("compression") in LOSSY or "compression" in case.get("changed", {})
    if "dropout" in str(case["model"]["blocks"]) or lossy:
        return ("model/", "loss/", "norm/", "eval/", "predict/", "skipped")
    if case["runtime"].startswith("parameter_server"):
        return ("norm/", "loss/", "skipped")
    if "rolled" in case:
        return ("norm/", "loss/", "skipped")
    in_parts = {"moved", "changed"} & set(case)
    return (*(("skipped",) if in_parts else ()), *(() if case.get("evaluate", True) else ("eval/",)))


def _unlike_replicas(answers: list[dict[str, Any]]) -> list[str]:
    problems = []
    digests = [digest for answer in answers for digest in answer["replicas"]]
    if len(set(digests)) > 1:
        problems.append(f"the replicas' weights differ: {[digest[:6] for digest in digests]}")
    for rank, answer in enumerate(answers[1:], 1):
        unlike = [
            name
            for name, value in answers[0]["arrays"].items()
            if name in answer["arrays"] and not np.array_equal(value, answer["arrays"][name], equal_nan=True)
        ]
        if unlike:
            problems.append(f"rank {rank} has other {', '.join(unlike[:5])} than rank 0")
    return problems


KEPT = 200
_known: dict[str, list] = {}  # the latest results, for cases that differ in the runtime alone


def doubles(case: Mapping[str, Any]) -> list[Arrays]:
    """Returns the oracle in float64, for each of the case's data."""
    from tests.fuzz import fit_case, oracle
    from tests.fuzz.data_order import order_of

    if case["kind"] == "fit":
        return _remembered("double", case, lambda case: fit_case.runs("double", case)[0])
    return [
        _remembered("double", part, lambda part: oracle.runs("double", part, order_of(part)))[0]
        for part in space.parts(case)
    ]


def runs_of(kind: str, case: Mapping[str, Any], number: int, part: Mapping[str, Any]) -> list[Arrays]:
    """Returns runs of the oracle with the case's data `number` that differ from the float64 run by rounding alone:
    "single", the run in the precision of the case; "some" and "more", perturbed runs."""
    from tests.fuzz import fit_case, oracle
    from tests.fuzz.data_order import order_of

    if case["kind"] == "fit":  # one model is fitted to all data, one after the other
        return [run[number] for run in _remembered(kind, case, lambda case: fit_case.runs(kind, case))]
    return _remembered(kind, part, lambda part: oracle.runs(kind, part, order_of(part)))


def _remembered(what: str, case: Mapping[str, Any], compute: Callable[[Mapping[str, Any]], list]) -> list:
    parts = {
        name: case.get(name)
        for name in ("kind", "seed", "model", "data", "again", "calls", "compile", "fit", "loop", "evaluate")
        + ("rolled", "changed")
    }
    options = {name: value for name, value in case.get("options", {}).items() if name not in MESH_ONLY}
    # The number of replicas matters where compressed gradients are rounded once for each worker,
    # and where it decides who reads which file of a stream.
    by_file = case.get("data_in_store") == "by_file"
    copies = space.replicas_of(case["runtime"], case["options"]) if "compression" in options or by_file else 0
    key = json.dumps([what, parts, options, copies, by_file], sort_keys=True)
    if key not in _known:
        while len(_known) >= KEPT:
            _known.pop(next(iter(_known)))
        _known[key] = compute(case)
    return _known[key]


def _answered(verdict: Verdict, answers: list[dict[str, Any]]) -> bool:
    """Whether all ranks have trained; if not, the verdict gets the reason."""
    told = sorted(enumerate(answers), key=lambda each: "gone" in each[1])  # first the ranks that can tell why
    failed = [(rank, answer["failed"]) for rank, answer in told if "failed" in answer]
    refused = [(answer["refused"], answer["sentence"]) for answer in answers if "refused" in answer]
    if failed:
        verdict.problems.append(
            f"rank {failed[0][0]} failed:\n{failed[0][1]}" + (f"\nwhile others refuse: {refused[0]}" if refused else "")
        )
    elif refused and len(refused) < len(answers):
        verdict.problems.append(f"only some ranks refuse: {refused[0]}")
    elif refused and not refusals.allowed(verdict.case, *refused[0]):
        verdict.problems.append(f"refused: {refused[0][0]}: {refused[0][1]}")
    elif refused:
        verdict.refused = refused[0][1]
    return not failed and not refused
