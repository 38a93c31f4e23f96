"""Finds the layouts that are possible on a number of devices, those that fit, and the three best; or why none fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tfdist.config import Config
from tfdist.control.exit_codes import ConfigError
from tfdist.data.batch_plan import BatchPlan, plan_batch
from tfdist.planner import layout_refusals
from tfdist.planner.estimate import Estimate, Plan, Proposal, estimate
from tfdist.planner.layout import Layout
from tfdist.planner.plan_text import gigabytes
from tfdist.runtime.mesh import Mesh

BEST = 3
_SAME = 0.02  # layouts whose speeds differ by less than this count as equally fast; the simplest is preferred


@dataclass(frozen=True)
class Wish:
    """The choices fixed by the user; None: to be searched."""

    mesh: Mesh | None = None
    zero: int | None = None
    recompute: bool | None = None


def parse_mesh(text: str, devices: int) -> Mesh | None:
    """Reads --mesh as tfdist.train does; None for "auto". Raises ConfigError."""
    if text == "auto":
        return None
    try:
        return Mesh.parse(text, devices)
    except ConfigError as error:  # its message is about workers; here each worker has one device
        raise ConfigError(f"--devices={devices}: {error}") from None


def layouts(plan: Plan, wish: Wish) -> Iterator[Layout]:
    """Yields every layout that training would accept. Raises ConfigError if the user's choices leave none."""
    if wish.recompute and not plan.model.blocks:
        raise ConfigError(
            f"--recompute=blocks, but no blocks of {plan.model.name} are known here that could be recomputed: use"
            " --recompute=none."
        )
    configs = [plan.config.replace(zero=zero) for zero in range(4)]
    by_zero = [layout_refusals.of_zero(config) for config in configs]
    refused, left = "", False
    for layout, batch in _candidates(plan, wish):
        found = by_zero[layout.zero] or layout_refusals.of_layout(plan.model, configs[layout.zero], layout, batch)
        if found:
            refused = refused or found
        else:
            left = True
            yield layout
    if refused and not left:
        raise ConfigError(refused)


class _Candidate(NamedTuple):
    """A layout, and the division of the batch to which it belongs."""

    layout: Layout
    batch: BatchPlan


def _candidates(plan: Plan, wish: Wish) -> Iterator[_Candidate]:
    """Yields every layout on which the model can be placed. Raises ConfigError if a fixed mesh does not allow it."""
    recomputes = [wish.recompute] if wish.recompute is not None else [False, True] if plan.model.blocks else [False]
    for mesh in [wish.mesh] if wish.mesh else _meshes(plan):
        if problem := layout_refusals.of_mesh(plan.model, mesh):
            if wish.mesh:
                raise ConfigError(problem)
            continue
        zeros = [wish.zero] if wish.zero is not None else range(4) if mesh.replicas > 1 else [0]
        for batch in _divisions(plan.config, mesh.replicas):
            micro = {"micro_batch": batch.micro_batch, "micro_batches": batch.accumulation}
            for zero in zeros:
                for recompute in recomputes:
                    yield _Candidate(Layout.on(mesh, zero=zero, recompute=recompute, **micro), batch)


def _meshes(plan: Plan) -> Iterator[Mesh]:
    """Yields every mesh of all devices whose groups along `model` stay within a node."""
    for pipe in _divisors(plan.devices):
        for tensor in _divisors(plan.devices // pipe):
            if tensor <= plan.hardware.per_node:
                for expert in _divisors(plan.devices // pipe // tensor):
                    data = plan.devices // (pipe * tensor * expert)
                    yield Mesh.create(data=data, pipe=pipe, model=tensor, expert=expert)


def _divisors(n: int) -> list[int]:
    return [size for size in range(1, n + 1) if n % size == 0]


def _divisions(config: Config, replicas: int) -> Iterator[BatchPlan]:
    """Yields the divisions of the batch to try for a number of replicas. Values fixed by flags are kept; with
    --global_batch alone, every division into powers of two is tried."""
    batch = config.batch
    if batch.global_batch and not batch.micro_batch and not batch.accumulation:
        accumulation = 1
        while accumulation * replicas <= batch.global_batch:
            if batch.global_batch % (accumulation * replicas) == 0 or accumulation == 1:
                yield BatchPlan(batch.global_batch, accumulation, replicas)
            accumulation *= 2
        return
    try:
        yield plan_batch(batch, replicas)
    except ConfigError:
        return  # it may work with another number of replicas


def search(plan: Plan, wish: Wish = Wish()) -> list[Proposal]:  # noqa: B008 - frozen
    """Returns up to three proposals, the best first, one for each mesh.

    If none fits, returns the one that needs the least memory, and why it does not fit. Raises ConfigError if there is
    no layout at all.
    """
    found = [estimate(plan, layout) for layout in layouts(plan, wish)]
    if not found:
        batch = plan.config.batch
        if not (batch.global_batch or batch.micro_batch):
            raise ConfigError(
                "Neither --global_batch nor --micro_batch is given, after the `--`: set what is planned for."
            )
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
        f"{found.memory.peak / 1e9:.3g} of {plan.hardware.memory_gb:g} GB",
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
