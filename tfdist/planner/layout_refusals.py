"""Finds layouts that training would refuse, as far as a configuration, a mesh and the shape of a model tell. Such
layouts are not proposed.

Rules that do not depend on the model are in mesh_rules.py, which training uses, too. For the model once it is built,
training/parallel/compose.py decides; a test checks that both agree.
"""

from __future__ import annotations

from tfdist.config import Config
from tfdist.config.strategies import strategy_or_undecided
from tfdist.control.exit_codes import ConfigError
from tfdist.data.batch_plan import BatchPlan
from tfdist.planner import mesh_rules
from tfdist.planner.layout import Layout
from tfdist.planner.shapes import ModelShape
from tfdist.runtime.mesh import Mesh


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
    if strategy_or_undecided(config.strategy.strategy).mesh:  # other strategies have no --zero to check
        try:
            config.validate()
        except ConfigError as error:
            return str(error)
    return ""


def of_layout(model: ModelShape, config: Config, layout: Layout, batch: BatchPlan) -> str:
    """Returns the reason why the run's flags do not fit a layout of a model, as a sentence; "" if they do. config: with
    the --zero of the layout."""
    chunks = config.parallel.pipe_chunks
    if layout.pipe > 1 and chunks > 1 and layout.pipe * chunks > model.blocks:
        return (
            f"--pipe_chunks={chunks} cuts the model of each of pipe={layout.pipe} stages into as many parts, but"
            f" {model.name} has {model.blocks} blocks at which it can be cut: lower one of them."
        )
    return mesh_rules.refusal(config, layout.mesh, batch)
