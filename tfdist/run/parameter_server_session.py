"""A parameter-server run from start to end, on the chief: the session of run/session.py with a loop of its own. What
workers and parameter servers do is in runtime/parameter_server.py."""

from __future__ import annotations

import os
from typing import Any

from tfdist import build
from tfdist.compat import keras_layers
from tfdist.config import Config
from tfdist.control import lease
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError, ExitCode
from tfdist.data import augment, input_pipeline
from tfdist.data.batch_plan import plan_batch
from tfdist.run.health import BETWEEN_STEPS, HealthMonitor
from tfdist.run.session import Session
from tfdist.runtime import parameter_server
from tfdist.runtime.factory import resolve_strategy
from tfdist.telemetry.events import Event
from tfdist.training.loop import LoopHooks, LoopSchedule, TrainResult
from tfdist.training.optimizer import make_optimizer
from tfdist.training.parameter_server.asynchronous import Asynchronous, Servers, Synchronous
from tfdist.training.parameter_server.parameters import ELEMENTWISE, Parameters
from tfdist.training.parameter_server.remote_step import RemoteOptions, RemoteStep


def run(config: Config, cluster: Cluster, command: str) -> ExitCode:
    """Trains as the chief; returns how it ended. Raises TfdistError subclasses."""
    with lease.held(build.run_folder(config), lease.job_identity(os.environ, cluster)):
        return _run(config, cluster, command)


def _run(config: Config, cluster: Cluster, command: str) -> ExitCode:
    config = parameter_server.prepare(config, cluster)
    monitor = HealthMonitor(config, Cluster())  # the others neither step nor answer beacons; the runtime watches them
    session = None
    try:
        session = ServerSession(resolve(config, cluster), cluster, command, monitor)
        return session.run()
    except Exception as error:
        found = (session and session.runtime.lost(error)) or monitor.failed(error)
        if session:
            session.give_up(found)
        if found is error:
            raise
        raise found from error


def slices(config: Config, cluster: Cluster) -> int:
    """Into how many parts a batch is cut."""
    return len(cluster.spec["worker"]) - config.servers.backup_workers if config.servers.ps_mode == "sync" else 1


def resolve(config: Config, cluster: Cluster) -> Config:
    """The batch arithmetic as numbers: the chief composes as the only replica, but the slices count as replicas."""
    plan = plan_batch(config.batch, slices(config, cluster))
    return config.replace(
        strategy=resolve_strategy(config, cluster),
        global_batch=plan.global_batch,
        accumulation=plan.accumulation,
        micro_batch=0,
    ).validate()


class ServerSession(Session):
    """The chief's session."""

    def __init__(self, config: Config, cluster: Cluster, command: str, monitor: HealthMonitor):
        super().__init__(config, cluster, command, monitor)
        job, split = self.job, self.job.train_split
        self.plan = plan_batch(self.config.batch, slices(self.config, cluster))
        if split.size is None:
            raise ConfigError(
                f"--strategy=parameter_server finds samples by their number, but --source={self.config.data.source} is"
                " a stream: use a source with random access, or --strategy=multi_worker."
            )
        options, whole = self.config.servers, self.config.optimizer.optimizer not in ELEMENTWISE
        self.parameters = Parameters(
            job.model,
            job.optimizer,
            job.schedule,
            lambda schedule: make_optimizer(self.config.optimizer, schedule),
            self.runtime.devices,
            0 if whole else options.ps_piece_kb * 1024,
            lambda step: job.step.counter.assign(step),
        )
        self.parameters.push(self.first_step)
        self.step = RemoteStep(
            self.parameters,
            job.model,
            job.objective,
            input_pipeline.batch_fetch(
                split,
                input_pipeline.Reading(
                    seed=self.config.run.seed,
                    shuffle=self.config.data.shuffle,
                    augment=augment.load_augmentation(self.config.data.augment),
                ),
            ),
            build.train_dataset(self.config, split, job.plan, 0, 0).element_spec,
            RemoteOptions(
                self.plan,
                self.config.run.seed,
                self.config.optimizer.clip_norm,
                options.max_staleness,
                options.staleness_scaling,
                job.step.options.weighted,
            ),
            job.step.added,
        )
        self._say(f"{options.ps_mode}: {self.plan.describe()}; {self.parameters.describe()}")

    def _say(self, message: str) -> None:
        self.observer(Event("start", self.first_step, {"message": message}))
        if (
            any(getattr(layer, "synchronized", False) for layer in keras_layers.all_layers(self.job.model))
            and self.runtime.workers > 1
        ):
            self.observer(
                Event(
                    "warning",
                    self.first_step,
                    {
                        "message": (
                            "BatchNormalization takes its statistics from what one worker has: parameter servers cannot"
                            " synchronise it (--nosync_batchnorm says so)."
                        )
                    },
                )
            )

    def run(self) -> ExitCode:
        loop, checkpoint, recovery = self.config.loop, self.config.checkpoint, self.recovery
        evaluator = self.job.evaluator()
        parts = LoopHooks(
            step=self.job.step,
            iterators=[],
            schedule=LoopSchedule(
                self.config.run.steps,
                loop.log_every,
                loop.eval_every,
                checkpoint.save_every,
                save_at_evaluation=bool(checkpoint.keep_best),
            ),
            global_batch=self.job.plan.global_batch,
            position=recovery.position,
            clock=self.clock,
            observer=self._observe,
            told=lambda: {"train/learning_rate": recovery.learning_rate()},
            evaluate=(lambda: self._evaluate(evaluator)) if evaluator else None,
            save=recovery.save,
            backup=recovery.back_up,
            requests=self._requests,
            section=self.monitor.watchdog.section,
        )
        servers = Servers(
            self.step,
            self.runtime.call,
            self.runtime.news,
            self.runtime.workers,
            self.config.servers.backup_workers,
            loop.on_nan == "skip",
        )
        self.trainer = (Synchronous if self.config.servers.ps_mode == "sync" else Asynchronous)(parts, servers)
        self.monitor.watchdog.enter(BETWEEN_STEPS)
        with self.diagnosis.naming():
            ending = self.trainer.train(self.first_step)
        return self._finish(ending)

    def _summary(self, ending: TrainResult, verdict: str) -> dict[str, Any]:
        return {
            **super()._summary(ending, verdict),
            "workers": self.runtime.workers,
            "parameter_servers": len(self.runtime.devices),
            **self.trainer.staleness.values(),
        }
