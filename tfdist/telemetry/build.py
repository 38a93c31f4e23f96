"""Which observers a worker has. A new tracker is a file of its own and a line in `build_observers`."""

from __future__ import annotations

from pathlib import Path

from tfdist.config import TelemetryConfig
from tfdist.telemetry.console import make_console
from tfdist.telemetry.events import FanOut, Observer
from tfdist.telemetry.jsonl import JsonlObserver
from tfdist.telemetry.tensorboard import TensorBoardObserver


def build_observers(config: TelemetryConfig, *, run_dir: Path, rank: int, total_steps: int, steps_per_epoch: float | None, run_id: str, attempt: int, resumed_step: int) -> FanOut:
    """Every rank writes JSONL; the chief also shows progress and writes for TensorBoard."""
    observers: list[Observer | None] = [JsonlObserver(run_dir / "logs" / f"rank-{rank}.jsonl", run_id=run_id, attempt=attempt, rank=rank)]
    if rank == 0:
        observers.append(make_console(config.progress, total_steps, steps_per_epoch))
        observers.append(TensorBoardObserver(run_dir / "tensorboard", resumed_step) if config.tensorboard else None)
    return FanOut([observer for observer in observers if observer])
