"""Checks made while a job is composed, because they need the model or the runtime. Each raises ConfigError."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import plugins
from tfdist.compat import keras_layers
from tfdist.config import Config
from tfdist.config.checks import what_distorts_carried_errors
from tfdist.config.strategies import strategy_or_undecided
from tfdist.control.exit_codes import ConfigError
from tfdist.models.nested_functions import refuse_batch_norm
from tfdist.planner import memory_check, mesh_rules
from tfdist.planner.layout import Layout
from tfdist.planner.memory_check import MemoryLimits
from tfdist.planner.shapes import Weight
from tfdist.runtime.base import Runtime
from tfdist.runtime.mesh import Mesh
from tfdist.training import same_model
from tfdist.training.objectives import Objective
from tfdist.training.row_checks.calm_layers import has_own_code
from tfdist.training.row_checks.trial_scope import trace
from tfdist.training.unsaved_state_checks import drawn, kinds_here


def check_best(config: Config, metrics: Sequence[str] | None) -> None:
    """Checks that evaluations have the metric that --keep_best uses. metrics: their metrics beside the loss; None:
    there are no evaluations."""
    best = config.checkpoint.keep_best
    found = () if metrics is None else ("loss", *metrics)
    if best and config.checkpoint.best_metric not in found:
        raise ConfigError(
            f"--keep_best={best}: evaluations have no such metric; they have"
            f" {', '.join(found) or 'none, as --source has no evaluation split'}."
        )


def check_model(config: Config, runtime: Runtime, model: keras.Model) -> None:
    """Checks that the model's BatchNormalization can use the moments of all replicas, that the model can be given parts
    of a batch, and that all workers have the same model and the same user code. A collective call.
    """
    if runtime.replicas > 1 or config.batch.accumulation > 1:
        _refuse_whole_batches(f"--model={config.model.model}", model)
    if runtime.replicas > 1 and config.model.sync_batchnorm:
        refuse_batch_norm(model)
    if runtime.size == 1:
        return
    named = {
        "source": config.data.source,
        "augment": config.data.augment,
        "model": config.model.model,
        "objective": config.model.objective,
    }
    own_parts = [plugins.resolve(flag, name, {}) for flag, name in named.items() if ":" in name]
    same_model.must_be_same_model(runtime, same_model.facts_of(model, own_parts))


def _refuse_whole_batches(flag: str, model: keras.Model) -> None:
    """Raises ConfigError for a model that remembers row i of the previous batch, or that fixes the number of rows."""
    parts = "several workers, replicas or micro-batches (--accumulation) compute parts of a batch"
    for layer in keras_layers.all_layers(model):
        rows = layer.batch_shape[0] if isinstance(layer, keras.layers.InputLayer) else None
        if rows is not None:
            raise ConfigError(
                f"{flag} takes batches of {rows} rows only, but {parts}: leave batch_size out of its keras.Input."
            )
    if layer := keras_layers.stateful_layer(model):
        raise ConfigError(
            f"{flag}: the layer {layer.name} is stateful, which carries the state of row i of a batch over to row i of"
            f" the next, but {parts}: use stateful=False."
        )


def with_xla(config: Config, runtime: Runtime, model: keras.Model, objective: Objective, spec: Any) -> Config:
    """Returns the configuration with --jit_compile set to on or off. If it was not given, it is on if the devices are
    GPUs and XLA can compile the step, as in Keras (the gain: docs/speed_log.md). spec: of a micro-batch (x, y, w).
    """
    if config.model.jit_compile is not None:
        check_compiled(config, runtime, model)
        return config
    can = (
        bool(tf.config.list_logical_devices("GPU"))
        and not strategy_or_undecided(config.strategy.strategy).parameter_servers
        and not (config.run.deterministic or _is_synchronized(model) and runtime.replicas > 1)
        and not (runtime.mesh and mesh_rules.not_compiled_on(runtime.mesh, config))
        and all(getattr(layer, "supports_jit", True) for layer in keras_layers.all_layers(model))
        and not (runtime.replicas > 1 and _draws_without_seeds(config, model, objective, spec))
    )
    return config.replace(jit_compile=can)


def _draws_without_seeds(config: Config, model: keras.Model, objective: Objective, spec: Any) -> bool:
    """Returns whether a user's model or objective draws by tf.random: XLA would draw the same on every replica."""
    if not (":" in config.model.objective or has_own_code(model)):
        return False
    found: list[str] = []

    def compute(x: Any, y: Any, w: tf.Tensor) -> None:
        objective(model(x, training=True), y, w)
        found.append(drawn(kinds_here()))

    with contextlib.suppress(Exception):  # user code may raise anything: the step reports it
        trace(model, compute, *spec)
    return any(found)


def check_compiled(config: Config, runtime: Runtime, model: keras.Model) -> None:
    """Raises ConfigError if synchronized BatchNormalization would be compiled: XLA cannot compile its collectives. A
    frozen one has none."""
    if config.model.jit_compile and _is_synchronized(model) and runtime.replicas > 1:
        raise ConfigError(
            "--jit_compile cannot compile synchronized BatchNormalization over several replicas: add"
            " --nosync_batchnorm, or drop --jit_compile."
        )


def _is_synchronized(model: keras.Model) -> bool:
    return any(getattr(layer, "synchronized", False) and layer.trainable for layer in keras_layers.all_layers(model))


def check_weighted(config: Config, runtime: Runtime, model: keras.Model, weighted: bool, x: Any) -> None:
    """Raises ConfigError for weighted samples where errors are carried from step to step (compression.py), and beside
    added losses in a pipeline, whose stages differentiate only once.

    Called before each rank drops the stages of the others, so that all ranks find the same: a rank that refused later,
    alone, would leave the others waiting. x: the spec of a micro-batch's inputs."""
    if refusal := what_distorts_carried_errors(config, has_weights=weighted):
        raise ConfigError(refusal)
    if not (weighted and runtime.mesh and runtime.mesh.degree("pipe") > 1):
        return
    found: list[int] = []

    def call(x: Any) -> None:
        model(x, training=True)
        found.append(len(model.losses))

    trace(model, call, x)
    if any(found):
        raise ConfigError(
            "Losses that layers add, and regularizers, do not work with weighted samples, or your own --objective, on a"
            " mesh with pipe= yet, whose stages differentiate once: drop one of them."
        )


def check_memory(config: Config, runtime: Runtime, model: keras.Model, limits: MemoryLimits) -> None:
    """Checks whether the run fits into memory, see planner/memory_check.py.

    Which variables the axes pipe, model and expert divide is decided later; this assumes the best case, all of them.
    """
    mesh = runtime.mesh or Mesh.create(data=runtime.replicas)
    layout = Layout(data=mesh.replicas, pipe=mesh.degree("pipe", "model", "expert"), zero=config.parallel.zero)
    weights = [
        Weight(variable.path, tuple(variable.shape), element_bytes=tf.as_dtype(variable.dtype).size)
        for variable in model.trainable_variables
    ]
    memory_check.check(config, layout, [(weight, 1) for weight in weights], limits)
