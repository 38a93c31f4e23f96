"""Applies --strategy=mesh to a model that the registry built, in this order:

mesh -> parts of layers (tensor.py, expert.py) -> stages and recomputation (segments.py) -> shards of state (zero.py),
compression -> pipeline -> step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras

from tfdist.config import Config
from tfdist.control.exit_codes import ConfigError
from tfdist.data.batch_plan import BatchPlan
from tfdist.planner import mesh_rules
from tfdist.runtime.collectives import Group
from tfdist.runtime.mesh_runtime import MeshRuntime
from tfdist.training.objectives import Objective
from tfdist.training.parallel import cut_trial, segments
from tfdist.training.parallel.assigned_weights import refuse_assigned
from tfdist.training.parallel.cut_trial import CutTrial
from tfdist.training.parallel.expert import has_experts, parallelize_experts
from tfdist.training.parallel.mesh_update import MeshUpdate, Placement
from tfdist.training.parallel.pipe_schedule import make_schedule
from tfdist.training.parallel.pipeline_parts import divide, stages_of
from tfdist.training.parallel.pipeline_stages import Pipeline
from tfdist.training.parallel.sequence import parallelize_sequence
from tfdist.training.parallel.shared_state import refuse_hidden, refuse_kept, refuse_shared
from tfdist.training.parallel.tensor import VariablePart, parallelize_layers, share, vocabulary_objective
from tfdist.training.parallel.zero import sharded_update


class MeshModel(NamedTuple):
    """The result of composing a model on a mesh."""

    update: MeshUpdate
    objective: Objective
    parts: Mapping[int, VariablePart]  # id of a trainable variable -> the part of it that is here
    pipeline: Pipeline | None


class _Layers(NamedTuple):
    """The layers and outputs after layers were cut along `model` and `expert`."""

    objective: Objective
    width: int  # of the outputs' last dim on this rank; 0: not known, the model is no graph of layers
    parts: Mapping[int, VariablePart]
    summed_over_model: frozenset[int]


def compose_mesh(
    config: Config,
    runtime: MeshRuntime,
    model: keras.Model,
    optimizer: keras.Optimizer,
    objective: Objective,
    plan: BatchPlan,
    rows: Callable[[int], Any] | None,
) -> MeshModel:
    """Distributes `model` over the mesh, in place, and builds `optimizer` on the variables that remain here.

    rows: (number) -> x of so many samples, the same on all workers; a user's own model is tried with them.
    Raises ConfigError if the model or the optimizer does not fit the mesh.
    """
    if refusal := mesh_rules.refusal(config, runtime.mesh, plan):
        raise ConfigError(refusal)
    layers = _parallelize(config, runtime, model, objective, rows, plan.micro_batch)
    pieces = _pieces(config, runtime, model)
    placement = Placement(
        {key: part.axis for key, part in layers.parts.items()},
        layers.summed_over_model,
        _stages(runtime, model, pieces, plan) if pieces else {},
    )
    update = _update(config, runtime, model, optimizer, placement)
    pipeline = None
    if pieces:
        # Each stage holds the state of its variables; mesh_rules refuses optimizers with state of other shapes.
        assert all(not len(each.shape) or id(each) in update.owners for each in optimizer.variables)
        schedule = make_schedule(
            config.parallel.pipe_schedule, runtime.mesh.degree("pipe"), plan.accumulation, config.parallel.pipe_chunks
        )
        pipeline = Pipeline(runtime, model, pieces, schedule, update, layers.width)
    elif config.parallel.recompute != "none":
        segments.recompute(model, config.parallel.recompute, update.storage_variables())
    return MeshModel(update, layers.objective, layers.parts, pipeline)


def _parallelize(
    config: Config,
    runtime: MeshRuntime,
    model: keras.Model,
    objective: Objective,
    rows: Callable[[int], Any] | None,
    micro_batch: int,
) -> _Layers:
    """Cuts layers over the `expert` and `model` axes."""
    group, width = runtime.group("model"), _width(model)
    parts: dict[int, VariablePart] = {}
    partial: frozenset[int] = frozenset()
    cut_logits = group.size > 1 and _shards_logits(model)
    trial, some, is_known = None, None, ":" not in config.model.model
    if runtime.mesh.degree("expert", "model") > 1:
        if rows and not is_known:
            sequence = config.parallel.sequence_parallel
            some = rows(cut_trial.ROWS)
            trial = CutTrial(runtime, model, rows, micro_batch=micro_batch, sequence_parallel=sequence)
        refuse_assigned(model, model.trainable_variables, f"--mesh={runtime.mesh.describe()}")
    if runtime.mesh.degree("expert") > 1:
        parts |= parallelize_experts(model, runtime.group("expert"), is_known, some)
    if group.size > 1:
        if cut_logits and not trial:
            _check_width(width, model, group)
        if config.parallel.sequence_parallel:
            found, partial = parallelize_sequence(model, group, is_known, some)
        else:
            found = parallelize_layers(model, group, is_known=is_known, rows=some)
        parts |= found
    if trial and (tried := trial.check(parts, partial)) is not None:
        cut_logits, width = tried > 0, tried or width
    if cut_logits:
        _check_width(width, model, group)
        objective = vocabulary_objective(config.model, group, width)
        first, last = share(width, group)
        width = last - first
    return _Layers(objective, width, parts, partial)


def _check_width(width: int, model: keras.Model, group: Group) -> None:
    if not width:
        raise ConfigError(
            f"--mesh has model={group.size}, over which the outputs of {model.name} would be cut as it has a layer"
            " embed_tokens, but it is not a functional model with one output, so their size is not known: build it with"
            " keras.Model(inputs, outputs), or use data= only."
        )


def _width(model: keras.Model) -> int:
    """The last dim of the model's one output; 0 for other models, which are neither cut into stages nor have their
    logits divided."""
    shape = getattr(model, "output_shape", None) or [0]  # subclassed models have none
    return shape[-1] if isinstance(shape[-1], int) else 0


def _stages(
    runtime: MeshRuntime, model: keras.Model, pieces: Sequence[Sequence[segments.Segment]], plan: BatchPlan
) -> dict[int, tuple[int, ...]]:
    """id of a variable -> the stages that hold it."""
    degree = runtime.mesh.degree("pipe")
    flag = f"--mesh={runtime.mesh.describe()}"
    refuse_shared(model, pieces, degree, flag, plan.micro_batch)
    refuse_hidden(model, flag)
    refuse_kept(model, pieces, flag, plan.micro_batch)
    return stages_of(model, pieces, degree)


def _update(
    config: Config, runtime: MeshRuntime, model: keras.Model, optimizer: keras.Optimizer, placement: Placement
) -> MeshUpdate:
    parallel = config.parallel
    options: dict[str, Any] = {"placement": placement, "bucket_bytes": int(config.strategy.pack_mb * 2**20)}
    if parallel.all_reduce == "hierarchical":
        options["summed_over"] = lambda group, stages: runtime.hierarchical(group, parallel.workers_per_host, stages)
    if parallel.zero:
        on_host = parallel.offload == "optimizer"
        return sharded_update(runtime, model, optimizer, parallel.zero, on_host=on_host, **options)
    options |= {"compression": parallel.compression, "compression_after": parallel.compression_after}
    return MeshUpdate(runtime, model, optimizer, **options)


def _pieces(config: Config, runtime: MeshRuntime, model: keras.Model) -> list[list[segments.Segment]]:
    """The pieces of the pipeline; empty without a pipeline."""
    degree, chunks = runtime.mesh.degree("pipe"), config.parallel.pipe_chunks
    if degree == 1:
        return []
    if has_experts(model):
        raise ConfigError(
            f"--mesh has pipe={degree}, whose stages cannot report the tokens that experts drop yet: use data=, expert="
            " or model= instead."
        )
    flag = f"--mesh has pipe={degree}"
    cut = segments.cut_into_blocks(model, flag)
    if config.parallel.recompute == "block":
        recomputed = segments.with_recompute(model, cut.segments, segments.blocks(model, flag), "--recompute=block")
        cut = cut._replace(segments=recomputed)
    return divide(cut, degree * chunks, config.parallel.pipe_cut)


def _shards_logits(model: keras.Model) -> bool:
    return any(layer.name == "embed_tokens" for layer in model.layers)
