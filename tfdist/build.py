"""Builds the parts of a run (`Job`) from a Config. The order is defined only here:

environment -> runtime (`start_runtime`); data -> batch plan, length -> precision -> schedule, objective -> synchronized
BatchNorm -> model -> optimizer -> trial runs of the model on a few rows -> on a mesh: training/parallel/compose.py;
otherwise faster kernels, slots, recompute -> step (`compose`). Restore, observers, evaluator and loop follow in
run/session.py. Parameter-server runs need more parts (Parameters, RemoteStep, Reading), which
run/parameter_server_run.py builds.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_layers
from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError
from tfdist.data import augment, contents, input_pipeline, streams
from tfdist.data.batch_plan import BatchPlan, plan_batch
from tfdist.data.sources.load_split import data_here, load_split
from tfdist.data.sources.split import SPLITS, Split
from tfdist.models.build_model import build_model
from tfdist.models.embedding_rows import read_rows
from tfdist.models.fused_batch_norm import fuse_batch_norm
from tfdist.models.short_softmax import keep_softmax_short
from tfdist.planner import memory_check
from tfdist.planner.memory_check import MemoryLimits
from tfdist.runtime import batch_norm
from tfdist.runtime.base import Runtime
from tfdist.runtime.environment import prepare_environment
from tfdist.runtime.factory import create_runtime
from tfdist.runtime.mesh_runtime import on_mesh
from tfdist.training import composition_checks, connected, model_data_checks
from tfdist.training.dropped_tokens import with_dropped
from tfdist.training.evaluation import Evaluator
from tfdist.training.measured_step import MeasuredStep
from tfdist.training.objectives import Objective, make_objective
from tfdist.training.optimizer import check_variables, make_optimizer
from tfdist.training.parallel import segments
from tfdist.training.parallel.compose import compose_mesh
from tfdist.training.parallel.sharded_state import ShardedState
from tfdist.training.precision import LossScale, set_policy
from tfdist.training.row_checks import mixing_augmentation, row_trials
from tfdist.training.schedule import Schedule
from tfdist.training.seeds import with_generator
from tfdist.training.step import TrainStep
from tfdist.training.step_options import Parallelism, StepOptions


@dataclass
class Job:
    """The parts of a run, composed but not yet trained."""

    config: Config  # resolved: steps, global batch and accumulation are numbers
    runtime: Runtime
    plan: BatchPlan
    train_split: Split
    eval_split: Split | None
    model: keras.Model
    optimizer: keras.Optimizer
    objective: Objective
    schedule: Schedule
    step: TrainStep
    parameters: int  # of the whole model, however it is sharded
    first_data: tuple[Split, tf.data.Dataset] | None = None  # for the first local replica, from the start of the split
    warnings: Sequence[str] = ()  # messages for the user about this composition
    state: ShardedState | None = None  # if the state is sharded over a mesh: how to gather it

    @property
    def stream_cut(self) -> int:
        """The number of streams into which a new run cuts its data; see data/streams.py."""
        return streams.stream_cut(self.train_split, self.plan)

    def iterators(self, consumed: int, cut: int | None = None) -> list:
        """Makes an iterator of training micro-batches for each local replica, from a position in the data order.

        cut: `stream_cut` of the run that has reached `consumed`; None: that of this run.
        """

        def dataset(index: int) -> tf.data.Dataset:
            if self.first_data and not index and not consumed and cut in (None, self.stream_cut):
                split, made = self.first_data
                if split is self.train_split:
                    return made  # tracing it again would take a tenth of a small run's startup
            replica = self.runtime.first_replica + index
            return train_dataset(self.config, self.train_split, self.plan, replica, consumed, cut)

        datasets = [dataset(index) for index in range(self.runtime.local_replicas)]
        if devices := self.runtime.batch_devices():
            datasets = [input_pipeline.ahead_on(*each) for each in zip(datasets, devices, strict=True)]
        return [iter(each) for each in datasets]

    def evaluator(self, model: keras.Model | None = None) -> Evaluator | None:
        """Returns an evaluator for the evaluation split, or None if the source has none.

        model: another model, evaluated as it is; by default the job's model with its moving averages.
        """
        split, runtime, options = self.eval_split, self.runtime, self.config.data
        if split is None:
            return None
        # Pads the last batch. A single process needs this, too, if the model keeps state for each row of a batch.
        filled = runtime.size > 1 or runtime.replicas > 1 or bool(keras_layers.stateful_layer(model or self.model))

        size = functools.cache(lambda: input_pipeline.eval_size(split, options.eval_samples))

        def datasets() -> tuple[list[tf.data.Dataset], int]:
            made = [
                input_pipeline.eval_dataset(
                    split,
                    batch=options.eval_batch or self.plan.micro_batch,
                    replica=runtime.first_replica + index,
                    replicas=runtime.replicas,
                    size=size(),
                    filled=filled,
                )
                for index in range(runtime.local_replicas)
            ]
            return [dataset for dataset, _ in made], made[0][1]

        if not model:
            return Evaluator(runtime, self.model, self.objective, datasets, self.step.update.averaged)
        objective = with_dropped(make_objective(self.config.model, self.train_split.element_spec[1]), model)
        return Evaluator(runtime, model, objective, datasets, contextlib.nullcontext)


def compose(config: Config, runtime: Runtime, limits: MemoryLimits | None = None) -> Job:
    """Builds every part of a run on a runtime. Raises TfdistError subclasses for problems that the user can fix.

    limits: the memory limits that the state must fit into; None: not checked.
    """
    train_split, eval_split = _load_splits(config, runtime)
    if eval_split and config.loop.eval_every >= 0:  # fail before the training rather than after it
        streams.must_end(eval_split, config.data.eval_samples)
    plan = plan_batch(config.batch, runtime.replicas)
    config = resolve(config, plan, train_split)
    train_split = mixing_augmentation.with_whole_batches_if_it_mixes(config, runtime, train_split, plan)
    data = train_dataset(config, train_split, plan, runtime.first_replica, 0)
    spec: Any = data.element_spec

    keras.utils.set_random_seed(config.run.seed)
    set_policy(config.precision)
    schedule = Schedule.create(config.schedule, config.run.steps)
    objective = make_objective(config.model, train_split.element_spec[1])
    batch_norm.synchronize_with(runtime)
    with runtime.scope():
        model = _make_model(config, train_split)
        composition_checks.check_model(config, runtime, model)
        config = composition_checks.with_xla(config, runtime, model, objective, spec)
        options = _step_options(config, runtime, plan, train_split)
        parameters = model.count_params()
        warnings = model_data_checks.check(config.model, model, train_split, eval_split, plan, spec)
        composition_checks.check_weighted(config, runtime, model, options.weighted, spec[0])
        if limits:
            composition_checks.check_memory(config, runtime, model, limits)
        optimizer = make_optimizer(config.optimizer, schedule)
        warnings += check_variables(config.optimizer, optimizer, model)
        loss_scale = LossScale(config.precision)
    batches = functools.partial(_batches, config, train_split)
    added = row_trials.check_rows(config, runtime, model, objective, plan, batches)
    idle = connected.unconnected(config, runtime, model, objective, spec)
    mesh_parts = None
    if on_mesh(runtime):
        rows = functools.cache(lambda number: next(batches(number))[0])
        mesh_parts = compose_mesh(config, runtime, model, optimizer, objective, plan, rows)
    if not mesh_parts:
        _build_whole(config, runtime, model, optimizer)
    objective = with_dropped(mesh_parts.objective if mesh_parts else objective, model)
    step = (MeasuredStep if config.telemetry.phase_every else TrainStep)(
        runtime,
        model,
        optimizer,
        objective,
        loss_scale,
        options,
        spec,
        Parallelism(mesh_parts.update, mesh_parts.pipeline, added) if mesh_parts else Parallelism(added=added),
    )
    composition_checks.check_best(config, step.metric_names if eval_split else None)
    if idle is not None:
        warnings += step.update.connected.fix(idle, len(model.trainable_variables))
    splits, first = (train_split, eval_split), (train_split, data)
    job = Job(config, runtime, plan, *splits, model, optimizer, objective, schedule, step, parameters, first, warnings)
    if mesh_parts and on_mesh(runtime):
        job.state = ShardedState(runtime, model, optimizer, step.variables, mesh_parts.update, mesh_parts.parts)
    return job


def _make_model(config: Config, split: Split) -> keras.Model:
    """Builds the model, and the generator for user code that draws random numbers without one."""
    model = build_model(config.model, split.element_spec[0], split.num_classes)
    return with_generator(model, own_objective=":" in config.model.objective)


def _build_whole(config: Config, runtime: Runtime, model: keras.Model, optimizer: keras.Optimizer) -> None:
    """Prepares a model and an optimizer that are replicated as a whole."""
    read_rows(model)
    if config.model.fused_batchnorm and (runtime.replicas == 1 or not config.model.sync_batchnorm):
        fuse_batch_norm(model)
    if tf.config.list_logical_devices("GPU"):  # unlike CPUs, GPUs are memory-bound here
        keep_softmax_short(model)
    with runtime.scope():
        optimizer.build(model.trainable_variables)
    if config.parallel.recompute != "none":
        segments.recompute(model, config.parallel.recompute, {})


def _step_options(config: Config, runtime: Runtime, plan: BatchPlan, split: Split) -> StepOptions:
    jit_compile = bool(config.model.jit_compile)
    return StepOptions(
        plan=plan,
        seed=config.run.seed,
        clip_norm=config.optimizer.clip_norm,
        jit_compile=jit_compile,
        compiled_update=jit_compile and runtime.compiles_updates and bool(tf.config.list_logical_devices("GPU")),
        skip_non_finite=config.loop.on_nan == "skip",
        deterministic=config.run.deterministic,
        phase_every=config.telemetry.phase_every,
        bfloat16_gradients=config.parallel.compression == "bf16",
        weighted=len(split.element_spec) == 3 or ":" in config.model.objective,
    )


def _load_splits(config: Config, runtime: Runtime) -> list[Split]:
    """Loads both splits; they are the same on all workers."""
    found, data = [], data_here(config)
    for name in SPLITS:
        # Seeds again, so that a user-defined source that draws its split at random always draws the same one.
        keras.utils.set_random_seed(config.run.seed)
        found.append(load_split(data, name))
    for split in found:
        contents.must_be_same_data(runtime, split)
    return found


def resolve(config: Config, plan: BatchPlan, split: Split) -> Config:
    """Replaces indirect settings (--epochs, --micro_batch) by the resulting numbers."""
    steps = config.run.steps
    if not steps:
        epochs = config.run.epochs
        size = int(split.stream(0, 1).cardinality()) if split.size is None else split.size  # below 0: not known
        steps = math.ceil(epochs * size / plan.global_batch)
        if split.size is None:
            example = f", for example --steps={steps} for {epochs:g} passes over its {size} samples" if size > 0 else ""
            what = f"--epochs={epochs:g} does not work with --source={config.data.source}, which is read as a stream"
            raise ConfigError(f"{what}: use --steps{example}.")
    # A limit on the micro-batch remains a limit: another number of workers may need another accumulation.
    limited = bool(config.batch.global_batch and config.batch.micro_batch and not config.batch.accumulation)
    batch = {} if limited else {"global_batch": plan.global_batch, "accumulation": plan.accumulation, "micro_batch": 0}
    return config.replace(steps=steps, epochs=0.0, **batch).validate()


def train_dataset(
    config: Config, split: Split, plan: BatchPlan, replica: int, consumed: int, cut: int | None = None
) -> tf.data.Dataset:
    """Returns a replica's training micro-batches, from a position in the data order. cut: see `Job.iterators`."""
    return input_pipeline.train_dataset(
        split,
        input_pipeline.Reading(
            seed=config.run.seed,
            shuffle=config.data.shuffle,
            augment=augment.load_augmentation(config.data.augment),
            threads=config.data.reader_threads,
            cut=cut,
        ),
        plan=plan,
        replica=replica,
        consumed=consumed,
    )


def batch_spec(config: Config, split: Split, plan: BatchPlan, replica: int) -> tuple:
    """Returns the element spec of a replica's micro-batches (x, y, w)."""
    spec: Any = train_dataset(config, split, plan, replica, 0).element_spec
    return spec


def _batches(config: Config, split: Split, number: int) -> Iterator[Any]:
    """Returns the training samples (x, y, w), `number` at a time, the same on all workers."""
    return iter(train_dataset(config, split, BatchPlan(number, 1, 1), 0, 0))


def memory_limits(cluster: Cluster) -> MemoryLimits:
    """Returns the memory limits of this worker, once its runtime has started."""
    return memory_check.find_limits(cluster, bool(tf.config.list_physical_devices("GPU")))


def start_runtime(config: Config, cluster: Cluster, began: float | None = None) -> Runtime:
    """Prepares the environment, then starts the runtime. began: since when peers are awaited (startup_deadline.py)."""
    prepare_environment(config)
    return create_runtime(config, cluster, began)
