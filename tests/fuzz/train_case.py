"""A case of tfdist.train in a worker process: composed as the command composes it, trained, evaluated, collected.

case["phase"] says which part of it: nothing for all; {"save": folder} for the first call and a snapshot, {"load": folder} for
the rest from there, perhaps on another runtime. With case["resumed"] the whole is done without a break and with one, and
both must be the same bit for bit.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.fuzz import given, snapshots
from tests.fuzz.oracle import is_number, once


def config_of(case: Mapping[str, Any]):
    """The flags of a case."""
    from tfdist.config import Config

    model = case["model"]
    own = {"model": "transformer", "model_args": model["builtin"]} if "builtin" in model else {"model": "tests.fuzz.given:model", "model_args": ""}
    return Config().replace(**{"source": "tests.fuzz.given:source", **own, "steps": sum(case["calls"]), "strategy": case["runtime"].partition(":")[0],
                               "log_every": 1000, "export": "none", "eval_batch": 4, "async_save": False, **case["options"]})


def run(case: dict[str, Any], runtime: Any) -> dict[str, Any]:
    """{"arrays": name -> array, "replicas": a digest of the weights of each local replica, "problems": sentences}"""
    if not case.get("resumed"):
        return _part(case, runtime, case.get("phase", {}))
    whole = _part(case, runtime, {})
    folder = _shared(runtime, tempfile.mkdtemp(prefix="tfdist-fuzz-"))
    _part(case, runtime, {"save": folder})
    again = _part(case, runtime, {"load": folder})
    different = snapshots.unlike(whole["state"], again["state"])
    problem = [f"stopped and resumed, {len(different)} variables are not bit for bit those of an undisturbed run: {', '.join(different[:4])}"] if different else []
    return {**whole, "problems": problem}


def _shared(runtime: Any, folder: str) -> str:
    """The chief's folder, on all ranks."""
    return runtime.broadcast([np.frombuffer(folder.encode().ljust(200), np.uint8)])[0].tobytes().decode().strip()


def _part(case: dict[str, Any], runtime: Any, phase: Mapping[str, str]) -> dict[str, Any]:
    import keras

    from tfdist import build
    from tfdist.artifacts.state import WholeState, collect
    from tfdist.runtime.weight_check import check_weights

    keras.backend.clear_session()
    given.case = case
    job = build.compose(config_of(case), runtime)
    iterators = snapshots.restore(job, phase["load"]) if "load" in phase else job.iterators(0)
    first = 1 if "load" in phase else 0
    calls = case["calls"][first:1 if "save" in phase else None]
    outputs = [job.step(iterators, count) for count in calls]
    if "save" in phase:
        snapshots.save(job, phase["save"], calls[0])
    whole = job.state or WholeState(collect(job.model, job.optimizer, job.step.variables))
    check_weights(runtime, whole.held(), "at the end")
    found = {f"loss/{call}": np.array(output.means["loss"]) for call, output in enumerate(outputs, first)}
    found |= {f"norm/{call}": np.array(output.gradient_norm) for call, output in enumerate(outputs, first)}
    if not phase:
        found["skipped"] = np.array(float(sum(output.skipped for output in outputs)))
    state = _state(job)
    found |= {name: np.asarray(value).astype(np.float64) for name, value in state.items() if name.startswith("model/") and value.dtype.kind != "i"}
    found |= {f"eval/{name}": np.array(value) for name, value in job.evaluator()().items() if name != "samples"} if case.get("evaluate", True) and not phase.get("save") else {}
    return {"arrays": found, "replicas": digests(job.model) if _is_whole(job, case) else [], "state": state if case.get("resumed") else {}, "problems": []}


def _state(job) -> dict[str, np.ndarray]:
    """The model's and the optimizer's variables by their places, whole; without the seeds, which are made anew in each step."""
    from tfdist.artifacts import state

    whole = job.state.to_host() if job.state is not None else state.to_host(state.collect(job.model, job.optimizer, job.step.variables))
    return {name: value for name, value in whole.items() if not name.startswith("model/") or value.dtype.kind != "i"}


def _is_whole(job, case: Mapping[str, Any]) -> bool:
    """Whether every rank holds all weights."""
    options = case["options"]
    return job.state is None or (options.get("zero", 0) < 3 and not any(axis in options.get("mesh", "") for axis in ("pipe", "model", "expert")))


def digests(model) -> list[str]:
    """Of each replica of this process, all of its numbers but the seeds."""
    copies: dict[int, Any] = {}
    for variable in once(model.variables):
        if is_number(variable):
            value = variable.value
            for index, copy in enumerate(getattr(value, "values", None) or [value]):
                copies.setdefault(index, hashlib.sha1()).update(np.asarray(copy).tobytes())
    return [copy.hexdigest() for copy in copies.values()]
