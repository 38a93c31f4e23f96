"""Finds the layouts that are possible on so many devices, that fit, and the three best; or why none fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tfdist.config import Config
from tfdist.control.exit_codes import ConfigError
from tfdist.data.batch_plan import plan_batch
from tfdist.planner.estimate import Estimate, Plan, Proposal, estimate
from tfdist.planner.layout import Layout
from tfdist.planner.plan_text import gigabytes
from tfdist.runtime.mesh import Mesh

BEST = 3
_SAME = 0.02  # layouts whose speeds differ by less count as equally fast: the simpler one goes first


@dataclass(frozen=True)
class Wish:
    """The choices that the user has fixed; None: to be found."""

    mesh: Mesh | None = None
    zero: int | None = None
    recompute: bool | None = None


def parse_mesh(text: str, devices: int) -> Mesh | None:
    """Reads --mesh as tfdist.train does; None for "auto". Raises ConfigError."""
    return None if text == "auto" else Mesh.parse(text, devices)


def layouts(plan: Plan, wish: Wish) -> Iterator[Layout]:
    """Every possible layout. Raises ConfigError if a fixed mesh does not suit the model."""
    model, devices = plan.model, plan.devices
    meshes = (
        [wish.mesh]
        if wish.mesh
        else [
            Mesh.create(data=devices // (pipe * tensor * expert), pipe=pipe, model=tensor, expert=expert)
            for pipe in _divisors(devices)
            if pipe <= max(1, model.blocks)
            for tensor in _divisors(devices // pipe)
            if tensor <= plan.hardware.per_node
            for expert in _divisors(devices // pipe // tensor)
        ]
    )
    recomputes = [wish.recompute] if wish.recompute is not None else [False, True] if model.blocks else [False]
    for mesh in meshes:
        problem = _problem(plan, mesh)
        if problem:
            if wish.mesh:
                raise ConfigError(problem)
            continue
        zeros = [wish.zero] if wish.zero is not None else range(4) if mesh.replicas > 1 else [0]
        for division in _divisions(plan.config, mesh.replicas):
            for zero in zeros:
                for recompute in recomputes:
                    yield Layout.on(mesh, **division._asdict(), zero=zero, recompute=recompute)


def _problem(plan: Plan, mesh: Mesh) -> str:
    """The reason why a mesh cannot be, or ""."""
    text = mesh.describe()
    tensor, pipe, expert = (mesh.degree(name) for name in ("model", "pipe", "expert"))
    if tensor > 1 and "model" not in plan.model.axes:
        return (
            f"--mesh={text}: what model={tensor} would divide of {plan.model.name} is not known here: it is of tfdist's"
            " transformers only. Plan without model=, or train with it and look at the memory in the log."
        )
    if tensor > 1 and plan.model.heads % tensor:
        return (
            f"--mesh={text}: model={tensor} must divide the attention heads, of which {plan.model.name} has"
            f" {plan.model.heads}."
        )
    if pipe > max(1, plan.model.blocks):
        return (
            f"--mesh={text}: pipe={pipe} is more than the {plan.model.blocks} blocks at which {plan.model.name} can be"
            " cut."
        )
    if expert > 1 and "expert" not in plan.model.axes:
        return f"--mesh={text}: expert={expert}, but {plan.model.name} has no experts."
    return ""


def _divisors(n: int) -> list[int]:
    return [size for size in range(1, n + 1) if n % size == 0]


class Division(NamedTuple):
    """The division of a global batch."""

    micro_batch: int
    micro_batches: int


def _divisions(config: Config, replicas: int) -> Iterator[Division]:
    """The divisions to try for a number of replicas. What the flags fix is kept; with --global_batch alone, every
    division into powers of two is tried."""
    batch = config.batch
    if batch.global_batch and not batch.micro_batch and not batch.accumulation:
        accumulation = 1
        while accumulation * replicas <= batch.global_batch:
            if batch.global_batch % (accumulation * replicas) == 0 or accumulation == 1:
                yield Division(-(-batch.global_batch // (accumulation * replicas)), accumulation)
            accumulation *= 2
        return
    try:
        found = plan_batch(batch, replicas)
    except ConfigError:
        return  # with another number of replicas it may do
    yield Division(found.micro_batch, found.accumulation)


def search(plan: Plan, wish: Wish = Wish()) -> list[Proposal]:  # noqa: B008 - frozen
    """Up to three proposals, the best first, one for each mesh.

    If none fits: the one that needs the least, and why it does not fit. Raises ConfigError if there is no layout at
    all.
    """
    found = [estimate(plan, layout) for layout in layouts(plan, wish)]
    if not found:
        batch = plan.config.batch
        raise ConfigError(
            f"No layout of --devices={plan.devices} suits the batch (--global_batch={batch.global_batch},"
            f" --micro_batch={batch.micro_batch}, --accumulation={batch.accumulation}): raise --global_batch, or use"
            " fewer devices."
        )
    fitting = [each for each in found if each.fits(plan.hardware)]
    if not fitting:
        least = min(found, key=lambda each: each.memory.peak)
        return [Proposal(least, _does_not_fit(plan, least))]
    fitting.sort(key=lambda each: -each.samples_per_s)
    best: list[Estimate] = []
    while fitting and len(best) < BEST:
        equal = [each for each in fitting if each.samples_per_s >= fitting[0].samples_per_s * (1 - _SAME)]
        best.append(min(equal, key=_complexity))
        fitting = [each for each in fitting if each.layout.mesh != best[-1].layout.mesh]
    return [Proposal(each, _reason(plan, each, best[0], found)) for each in best]


def _complexity(found: Estimate) -> tuple:
    layout = found.layout
    return (
        (layout.pipe > 1) + (layout.model > 1) + (layout.expert > 1),
        layout.recompute,
        layout.zero,
        layout.pipe * layout.model,
        layout.micro_batches,
    )


def _reason(plan: Plan, found: Estimate, best: Estimate, everything: list[Estimate]) -> str:
    available = plan.hardware.memory_gb * 1e9
    costs = {
        "the pipeline's bubble": found.step.bubble,
        "traffic inside the model": found.step.tensor,
        "gradients that the backward pass does not hide": found.step.exposed,
        "the update": found.step.update,
    }
    cost = max(costs, key=lambda name: costs[name])
    share = costs[cost] / found.step.total
    pieces = [
        (
            "the fastest that fits"
            if found is best
            else f"{found.samples_per_s / best.samples_per_s:.0%} of the best one's speed"
        ),
        f"{gigabytes(found.memory.peak)} of {plan.hardware.memory_gb:g} GB",
        f"it loses most to {cost}, {share:.1%} of a step" if share > 0.005 else "it computes nearly all the time",
    ]
    for name, simpler in (
        ("ZeRO", dataclasses.replace(found.layout, zero=0)),
        ("recompute", dataclasses.replace(found.layout, recompute=False)),
    ):
        other = next((each for each in everything if each.layout == simpler), None)
        if other and simpler != found.layout and other.memory.peak > available:
            pieces.append(f"without {name} it would need {gigabytes(other.memory.peak)}")
    return "; ".join(pieces)


def _does_not_fit(plan: Plan, least: Estimate) -> str:
    largest = max(least.memory.items().items(), key=lambda item: item[1])
    cure = {"activations": "lower --micro_batch or --sequence_length", "reserved": "use a larger device"}.get(
        largest[0], "use more devices or a larger one"
    )
    return (
        f"does not fit, because even {least.layout.describe()} needs {gigabytes(least.memory.peak)} on a device of"
        f" {plan.hardware.memory_gb:g} GB, {gigabytes(largest[1])} of it for {largest[0]}: {cure}"
    )
