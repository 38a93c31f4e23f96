"""The layout of a run over devices: the mesh, the ZeRO stage, recompute, micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from tfdist.planner.shapes import ModelPart


@dataclass(frozen=True)
class Layout:
    """Named axes of the mesh; model is innermost (neighbouring devices), then pipe, expert, and data outermost.

    `micro_batch` samples go through the model at a time on each replica, `micro_batches` times a step. Samples are
    divided over data and expert; what is no expert has a copy on each of these replicas.
    """

    data: int = 1
    pipe: int = 1
    model: int = 1
    expert: int = 1
    zero: int = 0
    recompute: bool = False
    micro_batch: int = 1
    micro_batches: int = 1

    @property
    def devices(self) -> int:
        return self.replicas * self.pipe * self.model

    @property
    def replicas(self) -> int:
        return self.data * self.expert

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.micro_batches * self.replicas

    def axes(self) -> dict[str, int]:
        return {"data": self.data, "pipe": self.pipe, "model": self.model, "expert": self.expert}

    def divisor(self, axis: str) -> int:
        """The number by which a weight is divided that `axis` can divide."""
        return {"": 1, "model": self.model, "expert": self.expert}[axis]

    def elements(self, part: ModelPart) -> float:
        """Parameters of one repetition of a part on each device, before ZeRO."""
        return sum(elements / self.divisor(axis) for axis, elements in part.elements.items())

    def describe(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.axes().items() if size > 1) or "one device"
        extras = [f"ZeRO-{self.zero}"] if self.zero else []
        extras += ["recompute"] if self.recompute else []
        return ", ".join([axes, *extras, f"micro-batch {self.micro_batch} x {self.micro_batches}"])

    def mesh(self) -> str:
        """The mesh as --mesh takes it."""
        return ",".join(f"{name}={size}" for name, size in self.axes().items() if size > 1) or "data=1"
