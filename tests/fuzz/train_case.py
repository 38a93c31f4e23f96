"""A case of tfdist.train in a worker process: composed as the command composes it, trained, evaluated, collected.

case["phase"] selects a part of the run: empty for all of it; {"save": place} for the first call and a snapshot;
{"load": place} for the rest from that snapshot, perhaps on another runtime. With case["resumed"] the run is done
without a break and with one, and both results must be the same bit for bit; with case["stored"] the snapshot goes
through an object store. changed_case.py and rolled_case.py have other ways to resume a run.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.fuzz import data, given, gpu_form, keras_settings, resume_space, snapshots, space, stored_data
from tests.fuzz.oracle import is_number, once


def config_of(case: Mapping[str, Any]):
    """The flags of a case."""
    from tfdist.config import Config

    model = case["model"]
    own = (
        {"model": "transformer", "model_args": model["builtin"]}
        if "builtin" in model and "around" not in model
        else {"model": "tests.fuzz.given:model", "model_args": ""}
    )
    return Config().replace(
        **{
            "source": "tests.fuzz.given:source",
            **own,
            "steps": sum(case["calls"]),
            **space.strategy_flags(case["runtime"]),
            "log_every": 1000,
            "export": "none",
            "eval_batch": data.EVAL_BATCH,
            "async_save": False,
            **case["options"],
        }
    )


def run(case: dict[str, Any], runtime: Any) -> dict[str, Any]:
    """Returns {"parts": ...} with, for each of the case's data: {"arrays": name -> array, "replicas": a digest of the
    weights of each local replica, "problems": sentences}
    """
    from tests.fuzz import changed_case, rolled_case

    if "rolled" in case:
        return rolled_case.run(case, runtime)
    if "changed" in case:
        return changed_case.run(case, runtime)
    if not case.get("resumed"):
        return {"parts": parts(case, runtime, case.get("phase", {}))}
    [whole] = parts(case, runtime, {})
    place = snapshots.place_of(case, runtime)
    parts(case, runtime, {"save": place})
    [again] = parts(case, runtime, {"load": place})
    different = snapshots.unlike(whole["state"], again["state"])
    problem = (
        [
            f"stopped and resumed, {len(different)} variables are not bit for bit those of an uninterrupted run:"
            f" {', '.join(different[:4])}"
        ]
        if different
        else []
    )
    return {"parts": [{**whole, "problems": problem}]}


def parts(case: dict[str, Any], runtime: Any, phase: Mapping[str, str]) -> list[dict[str, Any]]:
    """Runs one job with each of the case's data."""
    first, *others = space.parts(case)
    config, job, state = compose(first, runtime)
    begin = state.to_host() if others else {}
    found = [_trained(job, state, first, phase)]
    for other in others:
        given.case = other
        stored_data.forget(config, runtime)
        job.train_split, job.eval_split = _splits(config := config_here(other, runtime), runtime)
        snapshots.revert(job, state, begin)
        found.append(_trained(job, state, other, {}))
    stored_data.forget(config, runtime)
    return found


def compose(case: Mapping[str, Any], runtime: Any, flags: Mapping[str, Any] | None = None) -> tuple[Any, Any, Any]:
    """Returns (the configuration, the job, all of its state). flags: added to those of the case."""
    from tfdist import build
    from tfdist.artifacts.state import WholeState, collect

    keras_settings.forget_names()
    given.case = case
    config = config_here(case, runtime).replace(**(flags or {}))
    with gpu_form.composed(case):
        job = build.compose(config, runtime)
    return config, job, job.state or WholeState(collect(job.model, job.optimizer, job.step.variables))


def config_here(case: Mapping[str, Any], runtime: Any):
    """Returns the flags of a case, and writes its data where these flags say, if that is a store. A collective call."""
    if "data_in_store" not in case:
        return config_of(case)
    return config_of(case).replace(**stored_data.flags(case, runtime))


def _splits(config, runtime: Any) -> list:
    """Loads the splits like build.compose, but sets no seed: that would make TensorFlow forget its compiled functions,
    which costs a second.
    """
    from tfdist.data import contents
    from tfdist.data.sources.load_split import data_here, load_split
    from tfdist.data.sources.split import SPLITS

    here = data_here(config)
    splits = [load_split(here, name) for name in SPLITS]
    for split in splits:
        contents.must_be_same_data(runtime, split)
    return splits


def _trained(job, state, case: Mapping[str, Any], phase: Mapping[str, str]) -> dict[str, Any]:
    iterators = snapshots.restore(job, phase["load"], case["calls"][0]) if "load" in phase else job.iterators(0)
    first = 1 if "load" in phase else 0
    calls = case["calls"][first : 1 if "save" in phase else None]
    with snapshots.saving(job, phase["save"]) if "save" in phase else contextlib.nullcontext() as save:
        outputs = [job.step(iterators, count) for count in calls]
        if save:
            save(calls[0])
    found = {f"loss/{call}": np.array(output.means["loss"]) for call, output in enumerate(outputs, first)}
    found |= {f"norm/{call}": np.array(output.gradient_norm) for call, output in enumerate(outputs, first)}
    if not phase:
        found["skipped"] = np.array(float(sum(output.skipped for output in outputs)))
    told = collected(job, state, case, phase)
    return {**told, "arrays": {**found, **told["arrays"]}}


def collected(job, state, case: Mapping[str, Any], phase: Mapping[str, str]) -> dict[str, Any]:
    """Returns what a job holds after its steps."""
    from tfdist.runtime.weight_check import check_weights

    check_weights(job.runtime, state.held(), "at the end")
    arrays = _without_seeds(state.to_host())
    found = {
        name: np.asarray(value).astype(np.float64)
        for name, value in arrays.items()
        if name.startswith("model/") and value.dtype.kind != "i"
    }
    found |= (
        {f"eval/{name}": np.array(value) for name, value in job.evaluator()().items() if name != "samples"}
        if case.get("evaluate", True) and not phase.get("save")
        else {}
    )
    return {
        "arrays": found,
        "replicas": digests(job.model) if _is_whole(job, case) else [],
        "state": arrays if {"resumed", *resume_space.KEYS} & set(case) else {},
        "problems": [],
    }


def _without_seeds(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Leaves out the seeds, which each step derives again."""
    return {name: value for name, value in arrays.items() if not name.startswith("model/") or value.dtype.kind != "i"}


def _is_whole(job, case: Mapping[str, Any]) -> bool:
    """Whether every rank holds all weights."""
    options = case["options"]
    return job.state is None or (
        options.get("zero", 0) < 3 and not any(axis in options.get("mesh", "") for axis in ("pipe", "model", "expert"))
    )


def digests(model) -> list[str]:
    """Returns a digest of each replica of this process: of all its numbers but the seeds."""
    copies: dict[int, Any] = {}
    for variable in once(model.variables):
        if is_number(variable):
            value = variable.value
            for index, copy in enumerate(getattr(value, "values", None) or [value]):
                copies.setdefault(index, hashlib.sha1()).update(np.asarray(copy).tobytes())
    return [copy.hexdigest() for copy in copies.values()]
