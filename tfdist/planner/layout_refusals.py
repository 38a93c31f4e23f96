"""Finds layouts that training would refuse, as far as a configuration, a mesh and the shape of a model tell. Such
layouts are not proposed.

Rules that do not depend on the model are in mesh_rules.py, which training uses, too. For the model once it is built,
training/parallel/compose.py decides; a test checks that both agree.
"""

from __future__ import annotations

from collections.abc import Iterator

from tfdist.config import Config
from tfdist.config.optimizers import ELEMENTWISE_OPTIMIZERS, ELEMENTWISE_WORDS
from tfdist.config.strategies import strategy_or_undecided
from tfdist.control.exit_codes import ConfigError
from tfdist.data.batch_plan import BatchPlan
from tfdist.planner import mesh_rules
from tfdist.planner.layout import Layout
from tfdist.planner.shapes import ModelShape
from tfdist.runtime.mesh import Mesh

_WHOLE = "it does not treat each element separately, so it cannot work on"


def of_mesh(model: ModelShape, mesh: Mesh) -> str:
    """Returns the reason why a mesh does not suit a model, as a sentence; "" if it does."""
    flag = f"--mesh={mesh.describe()}"
    tensor, pipe, expert = (mesh.degree(name) for name in ("model", "pipe", "expert"))
    if tensor > 1 and "model" not in model.axes:
        return (
            f"{flag}: what model={tensor} would divide in {model.name} is known only for tfdist's transformers. Plan"
            " without model=, or train with it and look at the memory in the log."
        )
    if tensor > 1 and model.heads % tensor:
        return (
            f"{flag}: model={tensor} must divide the {model.heads} attention heads of {model.name}: choose a degree"
            " that does."
        )
    if pipe > 1 and model.experts:
        return (
            f"{flag}: pipe={pipe}, but {model.name} has experts, which stages do not support yet: use data=, expert= or"
            " model= instead."
        )
    if pipe > 1 and model.source == "graph":
        return (
            f"{flag}: where {model.name} can be cut into pipe={pipe} stages is not known here. Plan without pipe=, or"
            " train with it and look at the memory in the log."
        )
    if pipe > max(1, model.blocks):
        return f"{flag}: pipe={pipe} is more than the {model.blocks} blocks at which {model.name} can be cut: lower it."
    if expert > 1 and not model.experts:
        return f"{flag}: expert={expert}, but {model.name} has no experts: drop it."
    for experts in model.experts:
        if experts % expert:
            return (
                f"{flag}: expert={expert} must divide the {experts} experts of a layer of {model.name}: choose a degree"
                " that does."
            )
    return ""


def of_zero(config: Config) -> str:
    """Returns the reason why the run's flags do not fit its ZeRO stage, as a sentence; "" if they do."""
    zero, optimizer = config.parallel.zero, config.optimizer.optimizer
    if zero and optimizer not in ELEMENTWISE_OPTIMIZERS:
        return f"--zero={zero} with --optimizer={optimizer}: {_WHOLE} shards; use {ELEMENTWISE_WORDS}, or --zero=0."
    if strategy_or_undecided(config.strategy.strategy).mesh:  # other strategies have no --zero to check
        try:
            config.validate()
        except ConfigError as error:
            return str(error)
    return ""


def of_layout(model: ModelShape, config: Config, layout: Layout, batch: BatchPlan) -> str:
    """Returns the reason why the run's flags do not fit a layout of a model, as a sentence; "" if they do. config: with
    the --zero of the layout."""
    of_model = (*_optimizer(config, layout), *_pipe(model, config, layout))
    return next(iter(of_model), "") or mesh_rules.refusal(config, layout.mesh, batch)


def _optimizer(config: Config, layout: Layout) -> Iterator[str]:
    name, mesh = config.optimizer.optimizer, layout.mesh
    if name not in ELEMENTWISE_OPTIMIZERS and mesh.degree("model", "expert") > 1:
        yield (
            f"--mesh={mesh.describe()} with --optimizer={name}: {_WHOLE} parts of variables; use {ELEMENTWISE_WORDS},"
            " or data= only."
        )
    if name == "adafactor" and layout.pipe > 1:
        yield (
            f"--mesh has pipe={layout.pipe}, over which the state of --optimizer=adafactor cannot be spread, as it does"
            " not have the shapes of the variables: use another optimizer, or data= only."
        )


def _pipe(model: ModelShape, config: Config, layout: Layout) -> Iterator[str]:
    chunks, cut = config.parallel.pipe_chunks, config.parallel.pipe_cut
    if layout.pipe > 1 and chunks > 1 and layout.pipe * chunks > model.blocks:
        yield (
            f"--pipe_chunks={chunks} cuts the model of each of pipe={layout.pipe} stages into as many parts, but"
            f" {model.name} has {model.blocks} blocks at which it can be cut: lower one of them."
        )
    if cut and len(cut.split(",")) != layout.pipe * chunks - 1:
        yield (
            f"--pipe_cut={cut} names the beginnings of {len(cut.split(',')) + 1} parts, but --mesh has"
            f" pipe={layout.pipe} and --pipe_chunks={chunks}: change one of them, or drop it."
        )
