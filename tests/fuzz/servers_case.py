"""A case of tfdist.train with synchronous parameter servers: the chief's part, as run/parameter_server_session.py composes it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.fuzz import given, keras_settings
from tests.fuzz.train_case import config_of


def config_for(case: Mapping[str, Any]):
    """As the chief resolves it."""
    return config_of(case).replace(strategy="parameter_server", ps_mode="sync", log_every=max(case["calls"]), ps_piece_kb=0.05)


def run(case: dict[str, Any], runtime: Any, cluster: Any) -> dict[str, Any]:
    """See train_case.run."""
    import keras

    from tfdist import build
    from tfdist.data import augment, input_pipeline
    from tfdist.data.batch_plan import plan_batch
    from tfdist.run import parameter_server_session
    from tfdist.telemetry.timer import Clock
    from tfdist.training.loop import LoopHooks, LoopSchedule
    from tfdist.training.optimizer import make_optimizer
    from tfdist.training.parameter_server.asynchronous import Servers, Synchronous
    from tfdist.training.parameter_server.parameters import ELEMENTWISE, Parameters
    from tfdist.training.parameter_server.remote_step import RemoteOptions, RemoteStep
    from tfdist.training.requests import NOTHING

    keras_settings.forget_names()
    given.case = case
    config = parameter_server_session.resolve(config_for(case), cluster)
    job = build.compose(config, runtime)
    config, split = job.config, job.train_split
    whole = config.optimizer.optimizer not in ELEMENTWISE
    parameters = Parameters(job.model, job.optimizer, job.schedule, lambda schedule: make_optimizer(config.optimizer, schedule), runtime.devices,
                            0 if whole else config.servers.ps_piece_kb * 1024, lambda step: job.step.counter.assign(step))
    parameters.push(0)
    batch = input_pipeline.batch_fetch(split, input_pipeline.Reading(seed=config.run.seed, shuffle=config.data.shuffle, augment=augment.load_augmentation("none")))
    step = RemoteStep(parameters, job.model, job.objective, batch, build.train_dataset(config, split, job.plan, 0, 0).element_spec,
                      RemoteOptions(plan_batch(config.batch, parameter_server_session.slices(config, cluster)), config.run.seed, config.optimizer.clip_norm))
    told: list[dict] = []
    hooks = LoopHooks(step=job.step, iterators=[], schedule=LoopSchedule(config.run.steps, config.loop.log_every, -1, 0), global_batch=job.plan.global_batch,
                  position=lambda number: number * job.plan.global_batch, clock=Clock(), observer=lambda event: told.append(event.values) if event.kind == "train" else None,
                  told=dict, evaluate=None, save=lambda number: None, backup=lambda number: None, requests=lambda number: NOTHING, section=lambda name: contextlib.nullcontext())
    Synchronous(hooks, Servers(step, runtime.call, runtime.news, runtime.workers, 0, config.loop.on_nan == "skip")).train(0)
    found = {f"loss/{call}": np.array(values["train/loss"]) for call, values in enumerate(told)}
    found |= {f"model/{index:04d}": np.asarray(variable.value).astype(np.float64) for index, variable in enumerate(job.model.variables) if keras.backend.is_float_dtype(variable.dtype)}
    found |= {f"eval/{name}": np.array(value) for name, value in job.evaluator()().items() if name != "samples"}
    return {"parts": [{"arrays": found, "replicas": [], "problems": []}]}
