"""All figures of a plan for one layout: memory, time, scaling, reliability, as one Estimate."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tfdist.config import Config
from tfdist.planner.communication import ALGORITHMS, Group, all_reduce_seconds
from tfdist.planner.hardware import Hardware
from tfdist.planner.layout import Layout
from tfdist.planner.memory import KERAS, Memory, memory, slot_elements
from tfdist.planner.reliability import Reliability, reliability
from tfdist.planner.shapes import ModelShape
from tfdist.planner.time import DAY, StepTime, gradient_bytes, mfu, step_time
from tfdist.runtime.mesh import REPLICA_AXES

SCALE = tuple(2**power for power in range(11))  # 1 to 1024


@dataclass(frozen=True)
class Plan:
    """The question that an Estimate answers."""

    config: Config
    model: ModelShape
    hardware: Hardware
    devices: int
    samples: float = 0.0  # to train on in total; 0: unknown, or as many as `steps` take
    steps: int = 0  # number of steps of the run; 0: unknown
    algorithm: str = "auto"
    calibrated: bool = False  # whether the hardware's assumptions have been replaced by measurements

    def batch_on(self, layout: Layout) -> int:
        """The samples of a step. The layout's own number is larger if the batch does not divide over its replicas."""
        return min(self.config.batch.global_batch or layout.global_batch, layout.global_batch)

    def samples_on(self, layout: Layout) -> float:
        """The samples to train on in total; 0: unknown."""
        return self.samples or self.steps * self.batch_on(layout)


@dataclass(frozen=True)
class Estimate:
    """The figures of one layout, in seconds and bytes."""

    layout: Layout
    memory: Memory
    step: StepTime
    samples_per_s: float
    mfu: float
    reliability: Reliability
    days: float  # to train on all samples, including saves and failures; 0 if their number is unknown

    def fits(self, hardware: Hardware) -> bool:
        return self.memory.peak <= hardware.memory_gb * 1e9


@dataclass(frozen=True)
class Proposal:
    """An estimate to show, and why it is shown."""

    estimate: Estimate
    reason: str


def estimate(plan: Plan, layout: Layout) -> Estimate:
    """Computes the figures of a layout for a plan."""
    step = step_time(plan.model, plan.config, layout, plan.hardware, plan.algorithm)
    rate = plan.batch_on(layout) / step.total
    expected = reliability(
        checkpoint_bytes(plan),
        layout.devices,
        plan.hardware.mtbf_hours,
        plan.hardware.storage_gbs,
        asynchronous=plan.config.checkpoint.async_save,
    )
    days = plan.samples_on(layout) / (rate * expected.availability) / DAY if expected.availability else 0.0
    return Estimate(
        layout=layout,
        memory=_memory(plan, layout),
        step=step,
        samples_per_s=rate,
        mfu=mfu(plan.model.flops * rate, plan.config, layout.devices, plan.hardware),
        reliability=expected,
        days=days,
    )


def _memory(plan: Plan, layout: Layout) -> Memory:
    return memory(plan.model, plan.config, layout, plan.hardware.reserved_gb * 1e9, copies=plan.hardware.copies)


def checkpoint_bytes(plan: Plan) -> float:
    """The bytes of one snapshot: parameters, optimizer state and constants, whatever the layout."""
    return sum(
        part.repeat
        * (
            KERAS.parameter * (part.parameters + part.constants)
            + KERAS.slot * sum(slot_elements(plan.config.optimizer, weight) for weight in part.weights)
        )
        for part in plan.model.parts
    )


def zero_table(plan: Plan, layout: Layout) -> list[Memory]:
    """Returns the memory of a layout at ZeRO stages 0 to 3."""
    return [_memory(plan, dataclasses.replace(layout, zero=zero)) for zero in range(4)]


def recompute_table(plan: Plan, layout: Layout) -> dict[str, float]:
    """Returns the bytes of activations without and with recompute."""
    return {
        name: _memory(plan, dataclasses.replace(layout, recompute=recompute)).activations
        for name, recompute in (("kept", False), ("recomputed", True))
    }


def communication_table(plan: Plan, layout: Layout) -> dict[str, dict[str, float]]:
    """Returns {"in one node, over N" or "over all N replicas": {algorithm: seconds}} for one all-reduce of the
    gradients over the replicas. Groups of one device are left out.
    """
    everywhere = Group.along(layout.mesh, REPLICA_AXES, plan.hardware)
    size = gradient_bytes(plan.model.stages(layout.pipe), layout)[REPLICA_AXES]  # without experts
    groups = {
        f"in one node, over {everywhere.local}": Group(everywhere.local, everywhere.local),
        f"over all {everywhere.size} replicas": everywhere,
    }
    return {name: all_reduce_seconds(group, size, plan.hardware) for name, group in groups.items() if group.size > 1}


def scaling(plan: Plan, layout: Layout) -> list[dict[str, float]]:
    """Returns the weak scaling from 1 to 1024 devices: more replicas, the same work on each. Efficiency is relative to
    the smallest number of devices that holds one replica; sizes that are no multiple of that number are left out."""
    one = layout.pipe * layout.model * layout.expert
    rows, base = [], None
    for devices in SCALE:
        if devices % one:
            continue
        grown = dataclasses.replace(layout, data=devices // one)
        seconds = step_time(plan.model, plan.config, grown, plan.hardware, plan.algorithm).total
        rate = grown.global_batch / seconds
        base = base or rate / devices
        rows.append({"devices": devices, "samples_per_s": rate, "step_s": seconds, "efficiency": rate / devices / base})
    return rows


def as_json(plan: Plan, proposals: Sequence[Proposal]) -> dict[str, Any]:
    """Returns the plan as plain values: bytes, seconds, fractions. proposals: the best first."""

    def one(proposal: Proposal) -> dict[str, Any]:
        found = proposal.estimate
        return {
            "layout": {
                **dataclasses.asdict(found.layout),
                "devices": found.layout.devices,
                "global_batch": plan.batch_on(found.layout),
            },
            "reason": proposal.reason,
            "fits": found.fits(plan.hardware),
            "memory_bytes": dataclasses.asdict(found.memory),
            "step_s": {**dataclasses.asdict(found.step), "total": found.step.total},
            "samples_per_s": found.samples_per_s,
            "tokens_per_s": found.samples_per_s * plan.model.tokens,
            "mfu": found.mfu,
            "days": found.days,
            "reliability": {**dataclasses.asdict(found.reliability), "availability": found.reliability.availability},
        }

    best = proposals[0].estimate.layout
    return {
        "model": {
            "name": plan.model.name,
            "parameters": plan.model.parameters,
            "forward_flops_per_sample": plan.model.flops,
            "tokens_per_sample": plan.model.tokens,
            "source": plan.model.source,
        },
        "hardware": dataclasses.asdict(plan.hardware),
        "devices": plan.devices,
        "samples": plan.samples_on(best),
        "plans": [one(each) for each in proposals],
        "zero_bytes": [dataclasses.asdict(each) for each in zero_table(plan, best)],
        "activation_bytes": recompute_table(plan, best),
        "all_reduce_s": communication_table(plan, best),
        "algorithms": list(ALGORITHMS),
        "scaling": scaling(plan, best),
    }
