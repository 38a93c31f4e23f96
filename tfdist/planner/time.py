"""The seconds of a step, and of its parts: compute, bubble, communication that is not hidden, update.

step = fixed + (m + p - 1) micro-batches through the slowest stage + exposed communication + update

Products and convolutions run at `efficiency` x peak, which also covers everything else (element-wise operations,
launches). The backward pass takes twice the time of the forward pass, and recompute adds one forward pass. These are
assumptions until --calibrate replaces them by measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tfdist.config import Config
from tfdist.planner.communication import ALGORITHMS, Group, all_reduce_seconds, all_to_all, pass_seconds
from tfdist.planner.hardware import Hardware
from tfdist.planner.layout import Layout
from tfdist.planner.memory import KERAS, slot_elements
from tfdist.planner.pipeline import micro_batches_waited
from tfdist.planner.shapes import ModelPart, ModelShape
from tfdist.runtime.mesh import REPLICA_AXES

DAY = 86_400.0


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, and its parts."""

    compute: float  # all micro-batches, without the bubble
    bubble: float
    tensor: float  # all-reduces of tensor parallelism, all-to-alls of experts, transfers between stages
    gradients: float  # communication of gradients and sharded states, hidden or not
    exposed: float  # the part of `gradients` that the backward pass does not hide
    update: float
    fixed: float
    algorithm: str  # of the gradient all-reduce

    @property
    def total(self) -> float:
        return self.compute + self.bubble + self.tensor + self.exposed + self.update + self.fixed


def step_time(model: ModelShape, config: Config, layout: Layout, hardware: Hardware, algorithm: str) -> StepTime:
    """Computes the step time of a layout on some hardware."""
    stages = model.stages(layout.pipe)
    slowest = max(sum(part.repeat * part.flops for part in parts) for parts in stages)
    passes = 4 if layout.recompute and any(part.block for part in model.parts) else 3
    rate = hardware.tflops(config.precision.precision) * 1e12 * hardware.efficiency
    crowding = hardware.crowding(layout.devices)  # applies to all: on shared processors launches and copies cost, too
    one = passes * slowest * layout.micro_batch / layout.model / rate * crowding
    traffic = gradient_traffic(stages, layout, hardware, algorithm)
    seconds = traffic.seconds * crowding
    # At ZeRO stages 2 and 3 each micro-batch's backward pass can hide traffic; at stages 0 and 1 only the last one's
    # can.
    windows = layout.micro_batches if layout.zero >= 2 else 1
    exposed = max(seconds - hardware.overlap * one * 2 / passes * windows, seconds * 0.02)
    return StepTime(
        compute=one * layout.micro_batches,
        bubble=one * micro_batches_waited(layout.pipe, config.parallel.pipe_chunks),
        tensor=_inner_seconds(stages, config, layout, hardware) * crowding,
        gradients=seconds,
        exposed=exposed if seconds else 0.0,
        update=_update_seconds(stages, config, layout, hardware) * crowding,
        fixed=hardware.step_ms * 1e-3 * crowding,
        algorithm=traffic.algorithm,
    )


def gradient_bytes(stages: list[list[ModelPart]], layout: Layout) -> dict[tuple[str, ...], float]:
    """Returns the bytes of gradients that the fullest stage sends, by the axes along which they are added up."""
    fullest = max(stages, key=lambda parts: sum(part.repeat * layout.elements(part) for part in parts))
    found: dict[tuple[str, ...], float] = dict.fromkeys((REPLICA_AXES,), 0.0)
    for part in fullest:
        for axis, elements in part.elements.items():
            axes = layout.sharing(axis)
            found[axes] = found.get(axes, 0.0) + KERAS.gradient * part.repeat * elements / layout.divisor(axis)
    return found


class GradientTraffic(NamedTuple):
    """How long, and by which algorithm, gradients and sharded states travel."""

    seconds: float  # per step
    algorithm: str


def gradient_traffic(
    stages: list[list[ModelPart]], layout: Layout, hardware: Hardware, algorithm: str
) -> GradientTraffic:
    """Returns the traffic between the replicas, in float32."""
    if layout.replicas == 1:
        return GradientTraffic(0.0, "none")
    sizes = [(Group.along(layout.mesh, axes, hardware), size) for axes, size in gradient_bytes(stages, layout).items()]
    if layout.zero == 0:
        times = dict.fromkeys(ALGORITHMS, 0.0)
        for group, size in sizes:
            each = all_reduce_seconds(group, size, hardware)
            times = {name: seconds + each[name] for name, seconds in times.items()}
        name = min(times, key=lambda each: times[each]) if algorithm == "auto" else algorithm
        return GradientTraffic(times[name], name)
    once = sum(pass_seconds(group, size, hardware) for group, size in sizes)
    # Stage 1: reduce-scatter of gradients, all-gather of parameters. Stage 2: the former after each micro-batch. Stage
    # 3: also all-gathers of parameters, twice per micro-batch, for the forward and the backward pass.
    passes = {1: 2, 2: layout.micro_batches + 1, 3: 3 * layout.micro_batches}[layout.zero]
    return GradientTraffic(passes * once, "reduce-scatter and all-gather")


def _inner_seconds(stages: list[list[ModelPart]], config: Config, layout: Layout, hardware: Hardware) -> float:
    """Returns the seconds of traffic for which the next operation must wait."""
    seconds = 0.0
    blocks = max((sum(part.repeat for part in parts if part.block) for parts in stages), default=0)
    output = max((part.output for parts in stages for part in parts if part.block), default=0.0) * layout.micro_batch
    if layout.model > 1:
        # Two all-reduces forward and two backward for each block (Shoeybi et al. 2019), two more if recomputed.
        each = min(all_reduce_seconds(Group.along(layout.mesh, ["model"], hardware), output, hardware).values())
        seconds += blocks * (6 if layout.recompute else 4) * each * layout.micro_batches
    if layout.pipe > 1:
        group = Group.along(layout.mesh, ["pipe"], hardware)
        link = group.flat(hardware)
        hops = layout.micro_batches * config.parallel.pipe_chunks + layout.pipe - 1
        seconds += 2 * (link.alpha + output / link.beta) * hops
    if layout.expert > 1:  # tokens go to their experts and back, in the forward and the backward pass
        group = Group.along(layout.mesh, ["expert"], hardware)
        experts = max(sum(part.repeat for part in parts if "expert" in part.elements) for parts in stages)
        seconds += 4 * experts * all_to_all(layout.expert, output, group.flat(hardware)) * layout.micro_batches
    return seconds


def _update_seconds(stages: list[list[ModelPart]], config: Config, layout: Layout, hardware: Hardware) -> float:
    """Seconds of the update, which reads and writes parameters and slots and reads gradients: memory-bound."""

    def moved_by(part: ModelPart) -> float:
        each = KERAS.parameter * 2 + KERAS.gradient
        return part.repeat * sum(
            (each * weight.elements + 2 * KERAS.slot * slot_elements(config.optimizer, weight))
            / (layout.divisor(weight.axis) * layout.shards(weight.axis))
            for weight in part.weights
        )

    largest = max(stages, key=lambda parts: sum(part.repeat * part.parameters for part in parts))
    return sum(map(moved_by, largest)) / (hardware.memory_gbs * 1e9)


def mfu(forward_flops: float, config: Config, devices: int, hardware: Hardware) -> float:
    """Model FLOP utilization: 3 x the operations of the forward pass, without those that recompute adds, over the peak
    (Chowdhery et al. 2022, arXiv:2204.02311, appendix B). forward_flops: of the forward pass, a second."""
    return 3 * forward_flops / (devices * hardware.tflops(config.precision.precision) * 1e12)
