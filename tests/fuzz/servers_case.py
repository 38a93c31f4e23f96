"""A case of tfdist.train with synchronous parameter servers: the chief's part, composed as in
run/parameter_server_run.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.fuzz import given, keras_settings
from tests.fuzz.train_case import config_of


def config_for(case: Mapping[str, Any]):
    """Returns the chief's configuration of a case."""
    return config_of(case).replace(
        strategy="parameter_server", ps_mode="sync", log_every=max(case["calls"]), ps_piece_kb=0.05
    )


def run(case: dict[str, Any], runtime: Any, cluster: Any) -> dict[str, Any]:
    """See train_case.run."""
    import keras

    from tfdist import build
    from tfdist.run import parameter_server_run
    from tfdist.telemetry.timer import Clock
    from tfdist.training.loop import train
    from tfdist.training.loop_hooks import LoopHooks, LoopSchedule
    from tfdist.training.parameter_server.server_steps import Workers
    from tfdist.training.parameter_server.synchronous import Synchronous
    from tfdist.training.step_output import NOTHING

    keras_settings.forget_names()
    given.case = case
    config = parameter_server_run.resolve(config_for(case), cluster)
    job = build.compose(config, runtime)
    config = job.config
    schedule = LoopSchedule(config.run.steps, config.loop.log_every, -1, 0, steps_per_loop=1)
    workers = Workers(
        runtime.call,
        runtime.news,
        lambda step, sentence: None,
        runtime.compute_workers,
        0,
        config.loop.on_nan == "skip",
        lambda step: step * job.plan.global_batch,
        schedule.next_use_of_state,
    )
    step = Synchronous(parameter_server_run.remote_step(job, 0), workers, 0)
    told: list[dict] = []
    hooks = LoopHooks(
        step=step,
        iterators=[],
        schedule=schedule,
        global_batch=job.plan.global_batch,
        position=workers.position,
        clock=Clock(),
        observer=lambda event: told.append(event.values) if event.kind == "train" else None,
        extra_values=dict,
        evaluate=None,
        save=lambda number: None,
        backup=lambda number: None,
        requests=lambda number: NOTHING,
        section=lambda name: contextlib.nullcontext(),
    )
    train(hooks, 0)
    step.pull_state(config.run.steps)
    step.close()
    found = {f"loss/{call}": np.array(values["train/loss"]) for call, values in enumerate(told)}
    found |= {
        f"model/{index:04d}": np.asarray(variable.value).astype(np.float64)
        for index, variable in enumerate(job.model.variables)
        if keras.backend.is_float_dtype(variable.dtype)
    }
    found |= {f"eval/{name}": np.array(value) for name, value in job.evaluator()().items() if name != "samples"}
    return {"parts": [{"arrays": found, "replicas": [], "problems": []}]}
