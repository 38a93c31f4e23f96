"""A parameter-server run, on the chief: a session (session.py) whose steps are computed by workers. Workers and
parameter servers run the code in runtime/parameter_server.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from tfdist import build
from tfdist.compat import keras_layers
from tfdist.config import Config
from tfdist.config.optimizers import ELEMENTWISE_OPTIMIZERS
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError, ExitCode
from tfdist.data import augment, input_pipeline
from tfdist.data.batch_plan import plan_batch
from tfdist.run import session
from tfdist.run.trainer import Trainer, TrainerInputs
from tfdist.runtime.factory import resolve_strategy
from tfdist.runtime.parameter_server import has_servers, prepare
from tfdist.telemetry.events import Event
from tfdist.training.optimizer import make_optimizer
from tfdist.training.parameter_server.asynchronous import Asynchronous
from tfdist.training.parameter_server.parameters import Parameters
from tfdist.training.parameter_server.remote_step import RemoteOptions, RemoteStep
from tfdist.training.parameter_server.server_steps import Workers
from tfdist.training.parameter_server.synchronous import Synchronous


def run(config: Config, cluster: Cluster, command: str) -> ExitCode:
    """Trains as the chief; returns how it ended. Raises TfdistError subclasses."""
    config = resolve(prepare(config, cluster), cluster)
    # The others take no part in the session's steps and send no beacons; the runtime watches them.
    return session.run(session.Start(config, cluster, command, watched=Cluster(), make_trainer=ServerTrainer))


def slices(config: Config, workers: int) -> int:
    """The number of slices into which a batch is cut."""
    return workers - config.servers.backup_workers if config.servers.ps_mode == "sync" else 1


def resolve(config: Config, cluster: Cluster) -> Config:
    """Resolves the batch arithmetic: the chief composes as the only replica, but the slices count as replicas."""
    plan = plan_batch(config.batch, slices(config, len(cluster.spec["worker"])))
    numbers = {"global_batch": plan.global_batch, "accumulation": plan.accumulation, "micro_batch": 0}
    return config.replace(strategy=resolve_strategy(config, cluster), **numbers).validate()


class ServerTrainer(Trainer):
    """The chief's trainer; see trainer.py."""

    def __init__(self, inputs: TrainerInputs):
        job, config = inputs.job, inputs.job.config
        assert has_servers(job.runtime)
        # One step per call, so that requests are answered soon; several steps still run at a time.
        self.schedule = dataclasses.replace(inputs.schedule, steps_per_loop=1)
        self._runtime, self._remote = job.runtime, remote_step(job, inputs.first_step)
        workers = Workers(
            self._runtime.call,
            self._runtime.news,
            lambda step, sentence: inputs.observer(Event("warning", step, {"message": sentence})),
            self._runtime.compute_workers,
            config.servers.backup_workers,
            config.loop.on_nan == "skip",
            inputs.position,
            self.schedule.next_use_of_state,
        )
        kind = Synchronous if config.servers.ps_mode == "sync" else Asynchronous
        self.step = self._steps = kind(self._remote, workers, inputs.first_step)
        self.pull_state = self._steps.pull_state
        for event in placement(job, self._remote, inputs.first_step):
            inputs.observer(event)

    def extra_values(self) -> dict[str, float]:
        return self._steps.extra_values()

    def show_weights(self) -> None:
        self._steps.show_weights()

    def summary(self) -> dict[str, Any]:
        counts = {"workers": self._runtime.compute_workers, "parameter_servers": len(self._runtime.devices)}
        return {**counts, **self._steps.staleness.values()}

    def cause(self, error: BaseException) -> BaseException | None:
        return self._runtime.lost(error)

    def close(self) -> None:
        self._steps.close()


def placement(job: build.Job, remote: RemoteStep, first_step: int) -> Iterator[Event]:
    """Yields the events about how batches and weights are divided; announcement.py tells all else about the start."""
    plan, parameters = remote.options.plan, remote.parameters
    message = f"{job.config.servers.ps_mode}: {plan.describe()}; {parameters.describe()}"
    yield Event("placement", first_step, {"message": message})
    if job.runtime.compute_workers > 1 and any(
        getattr(layer, "synchronized", False) for layer in keras_layers.all_layers(job.model)
    ):
        message = (
            "BatchNormalization uses the statistics of one worker's rows: parameter servers cannot synchronize it"
            " (--nosync_batchnorm states this)."
        )
        yield Event("warning", first_step, {"message": message})


def remote_step(job: build.Job, first_step: int) -> RemoteStep:
    """Makes the workers' step; pushes the job's weights and state to the servers. Raises ConfigError on a stream."""
    config, split, runtime = job.config, job.train_split, job.runtime
    assert has_servers(runtime)
    if split.size is None:
        raise ConfigError(
            f"--strategy=parameter_server finds samples by their number, but --source={config.data.source} is"
            " a stream: use a source with random access, or --strategy=multi_worker."
        )
    parameters = Parameters(
        job.model,
        job.optimizer,
        job.schedule,
        lambda schedule: make_optimizer(config.optimizer, schedule),
        runtime.devices,
        config.servers.ps_piece_kb * 1024 if config.optimizer.optimizer in ELEMENTWISE_OPTIMIZERS else 0,
        lambda step: job.step.counter.assign(step),
    )
    parameters.push(first_step)
    return RemoteStep(
        parameters,
        job.model,
        job.objective,
        input_pipeline.batch_fetch(
            split,
            input_pipeline.Reading(
                seed=config.run.seed,
                shuffle=config.data.shuffle,
                augment=augment.load_augmentation(config.data.augment),
            ),
        ),
        build.batch_spec(config, split, job.plan, 0),
        RemoteOptions(
            plan_batch(config.batch, slices(config, runtime.compute_workers)),
            config.run.seed,
            config.optimizer.clip_norm,
            config.servers.max_staleness,
            config.servers.staleness_scaling,
            job.step.options.weighted,
        ),
        job.step.replica.added,
    )
