"""What the step needs to know of the configuration, and of the parallelism of a run."""

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
    compiled_update: bool = False  # XLA compiles what comes after the reduction, too
    skip_non_finite: bool = False
    # Runs repeat, bit for bit. TensorFlow refuses to look at the clock then: compute seconds are not measured.
    deterministic: bool = False
    phase_every: int = 0  # of as many calls one measures the phases of its steps (measured_step.py); 0: none
    bfloat16_gradients: bool = False  # they travel as such
    weighted: bool = True  # False: every weight is known to be 1, which saves a pass over the gradients


@dataclass(frozen=True)
class Parallelism:
    """The parts of a step that are not as on one device. By default every replica holds all of the model."""

    update: Update | None = None  # what becomes of gradients; None: data parallelism
    # Makes the gradients of all micro-batches of a step at once (parallel/pipeline_stages.py); None: one by one.
    pipeline: Callable | None = None
    added: SumsAsMeans | None = None  # makes means over rows of what layers add; None: all are means already


ALL_ON_EVERY_REPLICA = Parallelism()
