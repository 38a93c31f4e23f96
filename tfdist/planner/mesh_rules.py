"""Rules on which configurations a mesh excludes, whatever the model: training refuses them, and the planner does not
propose them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tfdist.config import Config
from tfdist.config.checks import what_distorts_carried_errors
from tfdist.config.optimizers import ELEMENTWISE_OPTIMIZERS, ELEMENTWISE_WORDS
from tfdist.data.batch_plan import BatchPlan
from tfdist.runtime.mesh import Mesh


def refusal(config: Config, mesh: Mesh, batch: BatchPlan) -> str:
    """Returns the reason why configuration and mesh do not fit, as a sentence; "" if they do."""
    return next((found for each in _RULES for found in each(config, mesh, batch)), "")


def not_compiled_on(mesh: Mesh, config: Config) -> str:
    """Returns the part of a mesh's step that XLA cannot compile; "" if there is none."""
    if (degree := mesh.degree("pipe")) > 1:
        return f"what the stages of pipe={degree} send each other"
    if mesh.size > 1 and (config.parallel.zero == 3 or mesh.degree("expert", "model") > 1):  # in the forward pass
        return "the collectives of --zero=3 or an expert or model axis"
    return ""


def _compiled(config: Config, mesh: Mesh, batch: BatchPlan) -> Iterator[str]:
    if config.model.jit_compile and (what := not_compiled_on(mesh, config)):
        yield f"--jit_compile cannot compile {what}: drop it."


def _optimizer(config: Config, mesh: Mesh, batch: BatchPlan) -> Iterator[str]:
    name, zero, pipe = config.optimizer.optimizer, config.parallel.zero, mesh.degree("pipe")
    if name not in ELEMENTWISE_OPTIMIZERS:
        whole = f"--optimizer={name}: it does not treat each element separately, so it cannot work on"
        if zero:
            yield f"--zero={zero} with {whole} shards; use {ELEMENTWISE_WORDS}, or --zero=0."
        if mesh.degree("model", "expert") > 1:
            yield f"--mesh={mesh.describe()} with {whole} parts of variables; use {ELEMENTWISE_WORDS}, or data= only."
    if name == "adafactor" and pipe > 1:  # its sums over rows and columns: their size would differ between stages
        yield (
            f"--mesh has pipe={pipe}, over which the state of --optimizer=adafactor cannot be spread, as it does not"
            " have the shapes of the variables: use another optimizer, or data= only."
        )


def _compression(config: Config, mesh: Mesh, batch: BatchPlan) -> Iterator[str]:
    kind = config.parallel.compression
    if kind == "none":
        return
    if config.parallel.zero:
        yield (
            f"--compression={kind} is for gradients that are whole on all workers, but --zero={config.parallel.zero}"
            " shards them: use --zero=0, or drop --compression."
        )
    if mesh.degree("pipe", "expert", "model") > 1:
        yield f"--compression={kind} is for --mesh with data only, not {mesh.describe()}: drop one of them."
    if refusal := what_distorts_carried_errors(config):
        yield refusal


def _offload(config: Config, mesh: Mesh, batch: BatchPlan) -> Iterator[str]:
    if config.parallel.offload != "none" and config.parallel.zero not in (1, 2):
        yield (
            f"--offload={config.parallel.offload} moves the optimizer's copy of the weights, which exists with --zero=1"
            f" or 2 only, not {config.parallel.zero}: add --zero=1."
        )


def _batch(config: Config, mesh: Mesh, batch: BatchPlan) -> Iterator[str]:
    if batch.even:
        return
    parts = (
        f"but --global_batch={batch.global_batch} is not a multiple of --accumulation={batch.accumulation} x"
        f" {batch.replicas} replicas: change one of them"
    )
    if (degree := mesh.degree("expert")) > 1:
        yield f"--mesh has expert={degree}, whose workers must have the same number of samples, {parts}."
    if (degree := mesh.degree("model")) > 1 and batch.accumulation > 2:
        # TensorFlow fixes the shape of a collective operation at its first use in a call, and the loop repeats it.
        yield (
            f"--mesh has model={degree}, whose micro-batches after the first must be of one size, {parts}, or take"
            " --accumulation=2."
        )
    if (degree := mesh.degree("pipe")) > 1:
        yield f"--mesh has pipe={degree}, whose micro-batches must be of one size, {parts}."


def _sequence(config: Config, mesh: Mesh, batch: BatchPlan) -> Iterator[str]:
    if not config.parallel.sequence_parallel:
        return
    if mesh.degree("model") == 1:
        yield (
            f"--sequence_parallel spreads positions over model, which --mesh={mesh.describe()} does not have: add for"
            " example model=2, or drop it."
        )
    if mesh.degree("pipe") > 1 or config.parallel.zero == 3:
        other = "--zero=3" if config.parallel.zero == 3 else f"pipe={mesh.degree('pipe')}"
        yield f"--sequence_parallel does not work with {other} yet: drop one of them."


def _cut(config: Config, mesh: Mesh, batch: BatchPlan) -> Iterator[str]:
    pipe, chunks, cut = mesh.degree("pipe"), config.parallel.pipe_chunks, config.parallel.pipe_cut
    if cut and pipe == 1:
        yield f"--pipe_cut={cut} cuts a pipeline, but --mesh has pipe=1: add pipe=2 or more, or drop it."
    elif cut and (parts := len(cut.split(",")) + 1) != pipe * chunks:
        yield (
            f"--pipe_cut={cut} names the beginnings of {parts} parts, but --mesh has pipe={pipe} and"
            f" --pipe_chunks={chunks}: change one of them, or drop it."
        )


def _rounds(config: Config, mesh: Mesh, batch: BatchPlan) -> Iterator[str]:
    degree, chunks = mesh.degree("pipe"), config.parallel.pipe_chunks
    if chunks > 1 and batch.accumulation % degree:
        yield (
            f"--pipe_chunks={chunks} takes micro-batches in rounds of pipe={degree}, but"
            f" --accumulation={batch.accumulation} is not a multiple of it: change one of them, or use --pipe_chunks=1."
        )


def _recompute(config: Config, mesh: Mesh, batch: BatchPlan) -> Iterator[str]:
    if (degree := mesh.degree("pipe")) > 1 and config.parallel.recompute == "attention":
        yield f"--recompute=attention does not work with pipe={degree}: use --recompute=block."


_RULES: tuple[Callable[[Config, Mesh, BatchPlan], Iterator[str]], ...] = (
    _optimizer,
    _cut,
    _compiled,
    _compression,
    _offload,
    _batch,
    _sequence,
    _rounds,
    _recompute,
)
