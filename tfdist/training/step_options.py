"""The parts of the configuration, and of the parallelism of a run, that the step needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tfdist.data.batch_plan import BatchPlan
from tfdist.training.row_checks.sums_as_means import SumsAsMeans
from tfdist.training.update import Update


@dataclass(frozen=True)
class StepOptions:
    """The options of the configuration that the step needs."""

    plan: BatchPlan
    seed: int
    clip_norm: float = 0.0
    jit_compile: bool = False
    compiled_update: bool = False  # XLA also compiles the computation after the reduction
    skip_non_finite: bool = False
    # Runs repeat, bit for bit. TensorFlow then refuses to read the clock: compute seconds are not measured.
    deterministic: bool = False
    phase_every: int = 0  # one in this many calls measures the phases of its steps (measured_step.py); 0: none
    bfloat16_gradients: bool = False  # gradients travel as bfloat16
    weighted: bool = True  # False: every weight is known to be 1, which saves a pass over the gradients


@dataclass(frozen=True)
class Parallelism:
    """The parts of a step that differ from those on one device. By default every replica holds the whole model."""

    update: Update | None = None  # reduces and applies gradients; None: data parallelism
    # Computes the gradients of all micro-batches of a step at once (parallel/pipeline_stages.py); None: one by one.
    pipeline: Callable | None = None
    added: SumsAsMeans | None = None  # turns losses that layers add into means over rows; None: all are means already


ALL_ON_EVERY_REPLICA = Parallelism()
