"""How many micro-batches the stages of a pipeline hold at once, and how long they wait for each other.

Formulas, so that the planner can try many layouts; a test compares them with the schedules that training follows
(training/parallel/pipe_schedule.py). Legend as there: S stages, M micro-batches, C chunks per stage.
"""

from __future__ import annotations

from tfdist.config import ParallelConfig
from tfdist.planner.layout import Layout


def micro_batches_held(parallel: ParallelConfig, layout: Layout, stage: int) -> float:
    """Returns the most micro-batches whose activations a stage holds at once; one that is in only some of its chunks
    counts as that fraction."""
    if layout.pipe == 1:
        return 1
    if parallel.pipe_schedule == "gpipe":
        return layout.micro_batches
    chunks, later = parallel.pipe_chunks, layout.pipe - stage - 1
    before = later if chunks == 1 else 2 * later + (chunks - 1) * layout.pipe  # passes before the first pair of turns
    return min((before + 1) / chunks, layout.micro_batches)


def micro_batches_waited(stages: int, chunks: int = 1) -> float:
    """Returns how long each stage waits in a step, in times of one micro-batch's work: (S - 1) / C."""
    return (stages - 1) / chunks


def bubble_fraction(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Returns the fraction of a step in which a stage is idle: (S - 1) / (M + S - 1) without chunks."""
    waited = micro_batches_waited(stages, chunks)
    return waited / (micro_batches + waited)
