"""Batch arithmetic: how a global batch is cut into micro-batches, and each micro-batch into parts for the replicas."""

from __future__ import annotations

from dataclasses import dataclass

from tfdist.config import BatchConfig
from tfdist.control.amounts_text import counted
from tfdist.control.exit_codes import ConfigError


@dataclass(frozen=True)
class BatchPlan:
    """How a global batch of consecutive positions is divided: first into micro-batches, then over the replicas.

    Cut points are i * B // n, so any global batch works with any number of replicas: parts differ by at most one
    sample, and which samples make a (global, micro) batch does not depend on the number of replicas.
    """

    global_batch: int
    accumulation: int
    replicas: int

    @property
    def micro_batch(self) -> int:
        """Samples per replica in one forward pass (the largest part, if parts are uneven)."""
        return -(-self.global_batch // (self.accumulation * self.replicas))

    @property
    def even(self) -> bool:
        return self.global_batch % (self.accumulation * self.replicas) == 0

    def slice(self, micro: int, replica: int) -> tuple[int, int]:
        """Returns [start, stop) within the global batch: the part of micro-batch `micro` that `replica` takes."""
        start = micro * self.global_batch // self.accumulation
        size = (micro + 1) * self.global_batch // self.accumulation - start
        return start + replica * size // self.replicas, start + (replica + 1) * size // self.replicas

    def describe(self) -> str:
        approximately = "" if self.even else "at most "
        return (
            f"global batch {self.global_batch} = {approximately}{self.micro_batch} per micro-batch "
            f"x {self.accumulation} accumulation x {counted(self.replicas, 'replica')}"
        )


def plan_batch(batch: BatchConfig, replicas: int) -> BatchPlan:
    """Completes the batch arithmetic for a number of replicas (at least 1).

    Any two of --global_batch, --micro_batch and --accumulation determine the third; with one alone, accumulation is 1.
    If only --global_batch is given beside it, --micro_batch is the most that a replica takes at a time.
    Raises ConfigError if the values contradict each other, if none is given, or if a micro-batch would be empty.
    """
    check_given(batch)
    total, micro, accumulation = batch.global_batch, batch.micro_batch, batch.accumulation
    if total and micro and not accumulation:
        # As many micro-batches as needed, so that fewer workers run the same global batch without more memory each.
        return _checked(BatchPlan(total, max(1, -(-total // (micro * replicas))), replicas))
    accumulation = accumulation or 1
    total = total or micro * accumulation * replicas
    if micro and micro * accumulation * replicas != total:
        raise ConfigError(
            f"--global_batch={total} contradicts --micro_batch={micro} x --accumulation={accumulation} x {replicas}"
            f" replicas = {micro * accumulation * replicas}: drop one of the three."
        )
    return _checked(BatchPlan(total, accumulation, replicas))


def check_given(batch: BatchConfig) -> None:
    """Raises ConfigError if no batch size is given."""
    if not batch.global_batch and not batch.micro_batch:
        raise ConfigError(
            "The batch size is not given: set --global_batch (samples per step over all workers) or --micro_batch."
        )


def _checked(plan: BatchPlan) -> BatchPlan:
    if plan.global_batch < plan.accumulation * plan.replicas:
        raise ConfigError(
            f"--global_batch={plan.global_batch} leaves some of {plan.replicas} replicas x {plan.accumulation}"
            f" micro-batches empty: raise it to at least {plan.accumulation * plan.replicas}, or use fewer workers."
        )
    return plan
