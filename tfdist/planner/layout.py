"""The layout of a run over devices: the mesh, the ZeRO stage, recompute, micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tfdist.planner.shapes import ModelPart
from tfdist.runtime.mesh import REPLICA_AXES, Mesh


@dataclass(frozen=True)
class Layout:
    """A mesh, whose ranks lie on the devices in the order of runtime/mesh.py, and how a run uses it.

    Each replica processes `micro_batch` samples at a time, `micro_batches` times per step. Samples are divided over
    data and expert; each of these replicas has a copy of everything except experts.
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
        return self.mesh.size

    @property
    def replicas(self) -> int:
        return self.mesh.replicas

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.micro_batches * self.replicas

    @classmethod
    def on(
        cls, mesh: Mesh, *, zero: int, recompute: bool = False, micro_batch: int = 1, micro_batches: int = 1
    ) -> Layout:
        """Returns the layout on a mesh."""
        return cls(
            **mesh.by_axis(), zero=zero, recompute=recompute, micro_batch=micro_batch, micro_batches=micro_batches
        )

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh.create(data=self.data, pipe=self.pipe, model=self.model, expert=self.expert)

    def divisor(self, axis: str) -> int:
        """Returns by how much a weight that `axis` can divide is divided."""
        return {"": 1, "model": self.model, "expert": self.expert}[axis]

    def sharing(self, axis: str) -> tuple[str, ...]:
        """Returns the axes along which devices hold the same part of a weight that `axis` can divide. Over these axes
        its gradients are added up, and ZeRO divides it. Other replicas have other experts."""
        return ("data",) if axis == "expert" and self.expert > 1 else REPLICA_AXES

    def shards(self, axis: str, from_stage: int = 1) -> int:
        """Returns the number of shards into which ZeRO divides such a weight, if it does so from this stage on."""
        return self.mesh.degree(*self.sharing(axis)) if self.zero >= from_stage else 1

    def elements(self, part: ModelPart) -> float:
        """Returns the parameters of one repetition of a part on each device, before ZeRO."""
        return sum(elements / self.divisor(axis) for axis, elements in part.elements.items())

    def describe(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh.by_axis().items() if size > 1) or "one device"
        extras = [f"ZeRO-{self.zero}"] if self.zero else []
        extras += ["recompute"] if self.recompute else []
        return ", ".join([axes, *extras, f"micro-batch {self.micro_batch} x {self.micro_batches}"])
