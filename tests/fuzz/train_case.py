"""A case of tfdist.train in a worker process: composed as the command composes it, trained, evaluated, collected."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.fuzz import given
from tests.fuzz.oracle import is_number, once


def config_of(case: Mapping[str, Any]):
    """The flags of a case."""
    from tfdist.config import Config

    strategy = case["runtime"].partition(":")[0]
    return Config().replace(**{"source": "tests.fuzz.given:source", "model": "tests.fuzz.given:model", "model_args": "", "steps": sum(case["calls"]), "strategy": strategy,
                               "log_every": 1000, "export": "none", "eval_batch": 4, **case["options"]})


def run(case: dict[str, Any], runtime: Any) -> dict[str, Any]:
    """{"arrays": name -> array, "replicas": a digest of the weights of each local replica}"""
    import keras

    from tfdist import build
    from tfdist.runtime.agreement import check_weights

    keras.backend.clear_session()
    given.case = case
    job = build.compose(config_of(case), runtime)
    iterators = job.iterators(0)
    outputs = [job.step(iterators, count) for count in case["calls"]]
    if job.state is None:
        check_weights(runtime, job.model, "at the end")
    found = {f"loss/{call}": np.array(output.means["loss"]) for call, output in enumerate(outputs)}
    found |= {f"norm/{call}": np.array(output.gradient_norm) for call, output in enumerate(outputs)}
    found["skipped"] = np.array(float(sum(output.skipped for output in outputs)))
    found |= weights_of(job)
    replicas = digests(job.model)
    found |= {f"eval/{name}": np.array(value) for name, value in job.evaluator()().items() if name != "samples"}
    return {"arrays": found, "replicas": replicas, "order": None}


def weights_of(job) -> dict[str, np.ndarray]:
    """The model's variables by their places, whole."""
    if job.state is not None:
        whole = job.state.to_host()
        return {name: np.asarray(value, np.float64) for name, value in whole.items() if name.startswith("model/") and value.dtype.kind != "i"}
    return {f"model/{index:04d}": np.asarray(variable.value).astype(np.float64) for index, variable in enumerate(once(job.model.variables)) if is_number(variable)}


def digests(model) -> list[str]:
    """Of each replica of this process, all of its numbers but the seeds."""
    copies: dict[int, Any] = {}
    for variable in model.variables:
        if is_number(variable):
            value = variable.value
            for index, copy in enumerate(getattr(value, "values", None) or [value]):
                copies.setdefault(index, hashlib.sha1()).update(np.asarray(copy).tobytes())
    return [copy.hexdigest() for copy in copies.values()]
