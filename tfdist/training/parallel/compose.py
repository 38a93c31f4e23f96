"""What --strategy=mesh does to a model that the registry built, in this order:

    mesh -> parts of layers (tensor.py) -> shards of state (zero.py) -> recompute -> step
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import keras

from tfdist.config import Config
from tfdist.control.exit_codes import ConfigError
from tfdist.runtime.mesh_runtime import MeshRuntime
from tfdist.training.objectives import Objective
from tfdist.training.parallel.mesh_update import MeshUpdate
from tfdist.training.parallel.tensor import Part, spread_layers, vocabulary_objective
from tfdist.training.parallel.zero import sharded_update


class Spread(NamedTuple):
    """What comes out."""

    update: MeshUpdate
    objective: Objective
    parts: Mapping[int, Part]  # id of a trainable variable -> the part of it that is here


def compose_mesh(config: Config, runtime: MeshRuntime, model: keras.Model, optimizer: keras.Optimizer, objective: Objective) -> Spread:
    """Spreads `model` over the mesh, in place, and builds `optimizer` on what is left. Raises ConfigError on what does not fit."""
    parallel, parts = config.parallel, {}
    _check(config, runtime)
    model_group = runtime.group("model")
    if model_group.size > 1:
        vocabulary = model.output_shape[-1]
        parts = spread_layers(model, model_group)
        if any(part.shape[0] == vocabulary for part in parts.values()) and _has_layer(model, "embed_tokens"):
            objective = vocabulary_objective(config.model, model_group, vocabulary)
    options = {"parts": frozenset(parts), "pack_bytes": int(config.strategy.pack_mb * 2**20)}
    update = sharded_update(runtime, model, optimizer, parallel.zero, **options) if parallel.zero else MeshUpdate(runtime, model, optimizer, compression=parallel.compression, **options)
    return Spread(update, objective, parts)


def _check(config: Config, runtime: MeshRuntime) -> None:
    spread = config.parallel.zero == 3 or runtime.mesh.degree("model") > 1
    if config.model.jit_compile and spread and runtime.size > 1:
        raise ConfigError("--jit_compile cannot compile the collectives of --zero=3 or a model axis: drop it.")
    _check_compression(config, runtime)
    for axis in ("pipe", "expert"):
        if runtime.mesh.degree(axis) > 1:
            raise ConfigError(f"--mesh has {axis}={runtime.mesh.degree(axis)}, which is not available yet: give these workers to data= or model=.")


def _check_compression(config: Config, runtime: MeshRuntime) -> None:
    kind = config.parallel.compression
    if kind == "none":
        return
    if config.parallel.zero:
        raise ConfigError(f"--compression={kind} is for gradients that are whole on all workers, but --zero={config.parallel.zero} shares them out: use --zero=0, or drop --compression.")
    if runtime.mesh.degree("pipe", "model") > 1:
        raise ConfigError(f"--compression={kind} is for --mesh with data only, not {runtime.mesh.describe()}: drop one of them.")
    if config.precision.precision == "float16" and kind in ("int8", "topk", "powersgd"):
        raise ConfigError(f"--compression={kind} carries errors from step to step, which the changing loss scale of --precision=float16 would distort: use --precision=bfloat16, or --compression=fp16.")


def _has_layer(model: keras.Model, name: str) -> bool:
    return any(layer.name == name for layer in model.layers)
