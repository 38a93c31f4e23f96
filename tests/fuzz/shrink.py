"""Makes a failing case smaller, one part at a time, as long as it fails in the same way; and prints it as a script."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.fuzz import models, space
from tests.fuzz.verdict import Verdict

NEEDED = ("global_batch", "learning_rate", "optimizer", "accumulation", "mesh", "objective")


def shrink(verdict: Verdict, judge: Callable[[dict], Verdict], seconds: float = 120.0) -> Verdict:
    """Returns the verdict on the smallest case found in time that fails in the same way."""
    deadline, kind = time.monotonic() + seconds, kind_of(verdict)
    smaller = True
    while smaller and time.monotonic() < deadline:
        smaller = False
        for case in reductions(verdict.case):
            if time.monotonic() > deadline:
                break
            if any(space.conflicts(part) for part in space.parts(case)):
                continue
            found = judge(case)
            if found.bad and kind_of(found) == kind:
                verdict, smaller = found, True
                break
    return verdict


def kind_of(verdict: Verdict) -> str:
    """Returns what went wrong, without the numbers."""
    first = verdict.problems[0]
    for word in (
        "should be refused",
        "failed",
        "refused",
        "refuse",
        "replicas' weights differ",
        "bit for bit",
        "has other",
    ):
        if word in first:
            return word + (first.split("\n")[1][:60] if word == "failed" and "\n" in first else "")
    return "differs"


def reductions(case: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields cases with one part less, the largest parts first."""

    def changed(change: Callable[[dict], Any]) -> dict[str, Any]:
        other = copy.deepcopy(dict(case))
        change(other)
        return other

    for data in (case["data"], *case["again"]) if "again" in case else ():
        yield changed(lambda other, data=data: (other.pop("again"), other.update(data=data)))
    blocks = case["model"]["blocks"]
    for index in range(len(blocks)):
        if len(blocks) > 1:
            yield changed(lambda other, index=index: other["model"]["blocks"].pop(index))
    for name in ("data_in_store", "stored", "resumed", "moved", "changed", "rolled", "optimized", "gpu"):
        if name in case:
            yield changed(lambda other, name=name: other.pop(name))
    for part in ("options", "compile", "fit"):
        for name in case.get(part, {}):
            if name not in NEEDED + ("batch_size", "epochs", "loss", "metrics"):
                yield changed(lambda other, part=part, name=name: other[part].pop(name))
    for name in case["data"]:
        if name not in ("size", "source", "weights"):
            yield changed(lambda other, name=name: other["data"].pop(name))
    yield from _simpler(case, changed)


def _simpler(case: Mapping[str, Any], changed: Callable) -> Iterator[dict[str, Any]]:
    if case["data"]["weights"] != "none":
        yield changed(lambda other: other["data"].update(weights="none"))
    if case["data"]["source"] != "arrays":
        yield changed(lambda other: other["data"].update(source="arrays"))
    if case.get("options", {}).get("accumulation", 1) > 1:
        yield changed(lambda other: other["options"].update(accumulation=1))
    if case.get("options", {}).get("optimizer", "sgd") != "sgd":
        yield changed(lambda other: other["options"].update(optimizer="sgd"))
    if case.get("calls", [1]) != [1]:
        yield changed(lambda other: other.update(calls=other["calls"][:-1] if len(other["calls"]) > 1 else [1]))
    if case["model"]["inputs"] != "rows" and "builtin" not in case["model"]:
        yield changed(
            lambda other: other["model"].update(
                inputs="rows", head="classes" if other["model"]["head"] == "tokens" else other["model"]["head"]
            )
        )
    if "named" in case["model"]:
        yield changed(lambda other: (other["model"].pop("named"), other["options"].pop("objective", None)))
    if case.get("compile", {}).get("metrics"):
        yield changed(lambda other: other["compile"].update(metrics=[]))


def script(case: Mapping[str, Any]) -> str:
    """Returns the case as a program that a user could have written."""
    text = (
        f'"""Found by scripts/fuzz.py: {case["runtime"]}."""\n\nimport keras\nfrom keras import layers\n\nfrom'
        f" tests.fuzz import data, train_steps\nfrom tests.fuzz import layers as own\n\nCASE = {dict(case)!r}\n\n\n"
    )
    text += models.source(case["model"]).rstrip() + "\n\n\n"
    if case["kind"] == "fit":
        return (
            text
            + "# The program is tests.fuzz.fit_case.run(CASE, tfdist), on the workers, beside .run(CASE, keras.Model),"
            f" in one process:\n# compile {json.dumps(case['compile'])}\n# fit {json.dumps(case['fit'])}\n"
        )
    options = {**space.strategy_flags(case["runtime"]), **case["options"]}
    flags = " ".join(f"--{name}={value}" for name, value in options.items())
    workers = space.RUNTIMES[case["runtime"]][1]
    return (
        text + "def source(split):\n    return data.as_source(CASE, split)\n\n\n# python -m tfdist.launch"
        f" --workers={workers} -- --model=found:model"
        f" --source=found:source --steps={sum(case['calls'])} {flags}\n"
    )
