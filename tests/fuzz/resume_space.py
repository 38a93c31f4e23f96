"""What may happen to a run of tfdist.train between start and end, other than being resumed unchanged:

"changed": {"batch": 4, "allowed": True}            resumed with another --global_batch
"changed": {"compression": "none", "allowed": True}      or another --compression; allowed: by --allow_config_change
"rolled": {"save_every": 2, "stop": 3, ...}         the whole loop with its snapshots, which rolls back after NaN;
                                                    stopped and resumed, it must end where an uninterrupted run does
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from tests.fuzz import mesh_space

LOSSY = ("int8", "topk", "powersgd")  # kinds of compression that carry errors over to later steps
KEYS = {"changed", "rolled"}
Case = Mapping[str, Any]


def drawn(case: Case, chance: random.Random, replicas: int) -> dict[str, Any]:
    """Returns the case, sometimes with one of these changes. The result may be one that `conflicts` rules out."""
    kind = chance.choices(["", "batch", "compression", "rolled"], [80, 6, 6, 8])[0]
    goes_on = {"resumed", "moved"} & set(case)
    if not kind or case["kind"] != "train" or case["runtime"].startswith("parameter_server") or goes_on:
        return dict(case)
    found = {name: value for name, value in case.items() if name != "again"}
    found["options"], found["data"] = dict(case["options"]), dict(case["data"])
    found["model"] = dict(case["model"])
    if kind == "rolled":
        return _rolled(found, chance, replicas)
    if len(found["calls"]) == 1:
        found["calls"] = [1, *found["calls"]]
    changed = _other_batch(found, chance, replicas) if kind == "batch" else _other_compression(found, chance)
    found["changed"] = {**changed, "allowed": chance.random() < 0.8}
    return found


def _other_batch(case: Case, chance: random.Random, replicas: int) -> dict[str, Any]:
    """Draws another batch, usually one that divides the number of samples consumed before the stop."""
    batch, least = case["options"]["global_batch"], case["options"]["accumulation"] * replicas
    consumed = case["calls"][0] * batch
    others = [each for each in range(least, case["data"]["size"] + 1) if each != batch]
    divisors = [each for each in others if consumed % each == 0]
    return {"batch": chance.choice(divisors if divisors and chance.random() < 0.85 else others or [batch])}


def _other_compression(case: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Draws a compression that is left out, or introduced, at the stop."""
    options = case["options"]
    options.pop("compression", None)
    if case["runtime"].startswith("mesh"):
        while "compression" not in options and mesh_space.can_compress(options):
            mesh_space.compress(chance, case["model"], options)
    kind = options.get("compression", "bf16")
    if chance.random() < 0.3:  # it begins when the run is resumed
        options.pop("compression", None)
        return {"compression": kind}
    options["compression"] = kind
    return {"compression": "none"}


def _rolled(case: dict[str, Any], chance: random.Random, replicas: int) -> dict[str, Any]:
    options, data = case["options"], case["data"]
    steps = chance.randint(4, 8)
    least = options["accumulation"] * replicas
    options["global_batch"] = chance.randint(least, max(least, 5))  # so that a pass has several steps
    options.pop("on_nan", None)
    if case["model"]["inputs"] in ("rows", "grid", "both"):
        data["nan"] = chance.randrange(100)
    case["calls"] = [steps]
    rolled: dict[str, Any] = {
        "save_every": chance.choice([2, 2, 3]),
        "log_every": chance.choice([1, 2, 4]),
        "stop": 0,
        "max_rollbacks": chance.choice([1, 3, 3, 5]),
    }
    if chance.random() < 0.5 or "nan" not in data:
        rolled["keep_best"] = "min:loss" if chance.random() < 0.5 else "max:loss"
        rolled["eval_every"] = chance.choice([1, 2, 3])
        scored = sorted({*range(rolled["eval_every"], steps, rolled["eval_every"]), steps})
        rolled["nan_evaluations"] = sorted(chance.sample(scored, chance.randint(1, min(2, len(scored)))))
    if chance.random() < 0.3:
        rolled["slow"] = True  # the uninterrupted run seems to take seconds for a step
    if "stored" not in case and chance.random() < 0.4:
        rolled["backup_every"] = chance.choice([1, 2, 3])
    ends = _ends_of_calls(rolled, steps)
    rolled["stop"] = chance.randrange(ends[-3] + 1) if len(ends) > 2 else 0
    case["rolled"] = rolled
    return case


def _ends_of_calls(rolled: Mapping[str, Any], steps: int) -> list[int]:
    """Returns 0 and the steps at which calls of the training function end. A stop requested during one call takes
    effect at the end of the next one, and has no effect if that is the last."""
    periods = [rolled[name] for name in ("save_every", "log_every", "eval_every", "backup_every") if name in rolled]
    return [step for step in range(steps) if any(step % period == 0 for period in periods)] + [steps]


def conflicts(case: Case, blocks: list[str], several: bool) -> str:
    """Why a case cannot have the change that it has; "" if it can."""
    from tests.fuzz import refusals

    goes_on = [name for name in (*KEYS, "resumed", "moved") if name in case]
    if len(goes_on) > 1 or {"again", "gpu", "optimized"} & set(case) or "unlike" in case["model"]:
        return "one thing at a time"
    if case["runtime"].startswith("parameter_server"):
        return "which neither goes back nor on here"
    without = {name: value for name, value in case.items() if name not in KEYS}
    if refusals.demanded(without) is not None:
        return "which refusal comes first is not looked at"
    options = case["options"]
    if "rolled" in case:
        if options.get("precision") == "float16":
            return "skips what does not fit"
        if options.get("on_nan"):
            return "what is skipped leads nowhere"
        if options.get("compression") in LOSSY:
            return "bit for bit only"
        if "stored" in case and "backup_every" in case["rolled"]:
            return "backups lie beside the run's folder"
        return "masks of its own" if "dropout" in blocks else ""
    changed = case["changed"]
    if len(case["calls"]) < 2 or changed.get("batch") == options["global_batch"]:
        return "nothing is changed"
    if "compression" in changed:
        return _compression_conflicts(case, several)
    return "masks of its own" if "dropout" in blocks else ""


def _compression_conflicts(case: Case, several: bool) -> str:
    options, changed = case["options"], case["changed"]["compression"]
    kinds = {options.get("compression", "none"), changed}
    [kind] = kinds - {"none"} if len(kinds - {"none"}) == 1 and "none" in kinds else [""]
    if not kind:
        return "none on one side"
    if not several or case["runtime"].startswith("horovod"):
        return "nothing travels"
    if kind in LOSSY and not (case["runtime"].startswith("mesh") and mesh_space.can_compress(options)):
        return "on a mesh of data only"
    if kind in LOSSY and mesh_space.changes_its_unit(case):
        return "errors that are carried on"
    if mesh_space.can_compress(options) or not case["runtime"].startswith("mesh"):
        return ""
    return "on a mesh of data only"


def after(case: Case) -> dict[str, Any]:
    """Returns the case with the flags with which it is resumed."""
    changed = {name: value for name, value in case["changed"].items() if name != "allowed"}
    names = {"batch": "global_batch"}
    options = {**case["options"], **{names.get(name, name): value for name, value in changed.items()}}
    return {**{name: value for name, value in case.items() if name != "changed"}, "options": options}


def features(case: Case) -> list[str]:
    if "rolled" in case:
        rolled = case["rolled"]
        return [
            *(["run:rollback"] if "nan" in case["data"] else []),
            *(["run:keep_best"] if "keep_best" in rolled else []),
            *(["run:backup"] if "backup_every" in rolled else []),
        ]
    if "changed" not in case:
        return []
    return ["changed:batch" if "batch" in case["changed"] else "changed:compression"]
