"""What training would refuse, so far as a configuration, a mesh and the shape of a model tell. Such layouts are not
proposed.

Training has the last word, over the model that is built: training/parallel/compose.py. A test holds both together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tfdist.config import Config
from tfdist.config.strategies import strategy_or_undecided
from tfdist.config.training_options import ELEMENTWISE_OPTIMIZERS
from tfdist.control.exit_codes import ConfigError
from tfdist.data.batch_plan import BatchPlan
from tfdist.planner.layout import Layout
from tfdist.planner.shapes import ModelShape
from tfdist.runtime.mesh import Mesh

_ELEMENTWISE = f"{', '.join(ELEMENTWISE_OPTIMIZERS[:-1])} or {ELEMENTWISE_OPTIMIZERS[-1]}"

_WHOLE = "it does not treat every element on its own, so it cannot work on"


def of_mesh(model: ModelShape, mesh: Mesh) -> str:
    """The reason why a mesh does not suit a model, as a sentence; "": it does."""
    flag = f"--mesh={mesh.describe()}"
    tensor, pipe, expert = (mesh.degree(name) for name in ("model", "pipe", "expert"))
    if tensor > 1 and "model" not in model.axes:
        return (
            f"{flag}: what model={tensor} would divide of {model.name} is not known here: it is of tfdist's"
            " transformers only. Plan without model=, or train with it and look at the memory in the log."
        )
    if tensor > 1 and model.heads % tensor:
        return (
            f"{flag}: model={tensor} must divide the attention heads, of which {model.name} has {model.heads}: choose a"
            " degree that does."
        )
    if pipe > 1 and model.experts:
        return (
            f"{flag}: pipe={pipe}, but {model.name} has experts, which stages cannot hold yet: use data=, expert= or"
            " model= instead."
        )
    if pipe > max(1, model.blocks):
        return f"{flag}: pipe={pipe} is more than the {model.blocks} blocks at which {model.name} can be cut: lower it."
    if expert > 1 and not model.experts:
        return f"{flag}: expert={expert}, but {model.name} has no experts: drop it."
    for experts in model.experts:
        if experts % expert:
            return (
                f"{flag}: expert={expert} must divide the experts, of which a layer of {model.name} has {experts}:"
                " choose a degree that does."
            )
    return ""


def of_zero(config: Config, zero: int) -> str:
    """The reason why the run's flags do not go with a ZeRO stage, as a sentence; "": they do."""
    parallel, optimizer = config.parallel, config.optimizer.optimizer
    if zero and optimizer not in ELEMENTWISE_OPTIMIZERS:
        return f"--zero={zero} with --optimizer={optimizer}: {_WHOLE} shards; use {_ELEMENTWISE}, or --zero=0."
    if parallel.compression != "none" and zero:
        return f"--compression={parallel.compression} does not go with --zero={zero}: drop one of them."
    if parallel.offload != "none" and zero not in (1, 2):
        return f"--offload={parallel.offload} is for --zero=1 or 2, not {zero}: change one of them."
    if strategy_or_undecided(config.strategy.strategy).mesh:  # else there is no --zero to check with the other flags
        try:
            config.replace(zero=zero).validate()
        except ConfigError as error:
            return str(error)
    return ""


def of_layout(config: Config, layout: Layout, batch: BatchPlan) -> str:
    """The reason why the run's flags do not go with the rest of a layout, as a sentence; "": they do."""
    return next((found for each in _CHECKS for found in each(config, layout, batch)), "")


def _optimizer(config: Config, layout: Layout, batch: BatchPlan) -> Iterator[str]:
    name, mesh = config.optimizer.optimizer, layout.mesh
    if name not in ELEMENTWISE_OPTIMIZERS and mesh.degree("model", "expert") > 1:
        yield (
            f"--mesh={mesh.describe()} with --optimizer={name}: {_WHOLE} parts of variables; use {_ELEMENTWISE}, or"
            " data= only."
        )
    if name == "adafactor" and layout.pipe > 1:
        yield (
            f"--mesh has pipe={layout.pipe}, over which the state of --optimizer=adafactor cannot be spread, as it has"
            " not the shapes of the variables: use another optimizer, or data= only."
        )


def _batch(config: Config, layout: Layout, batch: BatchPlan) -> Iterator[str]:
    if batch.even:
        return
    parts = (
        f"must be of one size, but --global_batch={batch.global_batch} is not a multiple of"
        f" --accumulation={batch.accumulation} x {batch.replicas} replicas: change one of them."
    )
    for axis in ("pipe", "expert"):
        if layout.mesh.degree(axis) > 1:
            yield f"--mesh has {axis}={layout.mesh.degree(axis)}, whose micro-batches {parts}"
    if layout.model > 1 and batch.accumulation > 2:
        yield f"--mesh has model={layout.model}, whose micro-batches after the first {parts}"


def _pipe(config: Config, layout: Layout, batch: BatchPlan) -> Iterator[str]:
    chunks, cut = config.parallel.pipe_chunks, config.parallel.pipe_cut
    if layout.pipe > 1 and chunks > 1 and batch.accumulation % layout.pipe:
        yield (
            f"--pipe_chunks={chunks} takes micro-batches in rounds of pipe={layout.pipe}, but"
            f" --accumulation={batch.accumulation} is not a multiple of it: change one of them, or use --pipe_chunks=1."
        )
    if cut and len(cut.split(",")) != layout.pipe * chunks - 1:
        yield (
            f"--pipe_cut={cut} names the beginnings of {len(cut.split(',')) + 1} parts, but --mesh has"
            f" pipe={layout.pipe} and --pipe_chunks={chunks}: change one of them, or drop it."
        )


def _parallel(config: Config, layout: Layout, batch: BatchPlan) -> Iterator[str]:
    parallel, mesh = config.parallel, layout.mesh
    if parallel.sequence_parallel and layout.model == 1:
        yield f"--sequence_parallel spreads positions over model, of which --mesh={mesh.describe()} has none: drop it."
    if parallel.sequence_parallel and (layout.pipe > 1 or layout.zero == 3):
        other = "--zero=3" if layout.zero == 3 else f"pipe={layout.pipe}"
        yield f"--sequence_parallel does not go with {other} yet: drop one of them."
    if parallel.compression != "none" and mesh.degree("pipe", "expert", "model") > 1:
        yield (
            f"--compression={parallel.compression} is for --mesh with data only, not {mesh.describe()}: drop one of"
            " them."
        )


def _compiled(config: Config, layout: Layout, batch: BatchPlan) -> Iterator[str]:
    if not config.model.jit_compile or layout.devices == 1:
        return
    if layout.zero == 3 or layout.mesh.degree("pipe", "expert", "model") > 1:
        yield (
            f"--jit_compile cannot compile the collectives of --mesh={layout.mesh.describe()} with"
            f" --zero={layout.zero}: drop it, or use data= only and --zero=2 at most."
        )


_CHECKS: tuple[Callable[[Config, Layout, BatchPlan], Iterator[str]], ...] = (
    _optimizer,
    _batch,
    _pipe,
    _parallel,
    _compiled,
)
