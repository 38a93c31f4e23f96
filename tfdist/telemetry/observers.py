"""Makes the observers of a worker. A new tracker is a separate file and a line in tracker_names.py."""

from __future__ import annotations

from tfdist.config import TelemetryConfig, parse_profile_steps
from tfdist.control.ranks import parse_ranks
from tfdist.telemetry import profiler
from tfdist.telemetry.console import EpochAt, make_console
from tfdist.telemetry.events import FanOut, Observer
from tfdist.telemetry.jsonl import JsonlObserver
from tfdist.telemetry.opentelemetry import Spans
from tfdist.telemetry.prometheus import PrometheusEndpoint
from tfdist.telemetry.trackers import Run, make_trackers


def build_observers(
    config: TelemetryConfig, run: Run, *, total_steps: int, epoch_at: EpochAt, may_fail: bool = False
) -> FanOut:
    """Makes a worker's observers. Every rank writes JSONL and may have an endpoint, spans and traces; the chief also
    shows progress and has the trackers. may_fail: see make_trackers.
    """
    # Trackers first: they read what earlier attempts wrote to the log.
    trackers = make_trackers(config.trackers, run, may_fail) if run.rank == 0 else []
    observers: list[Observer | None] = [
        JsonlObserver(run.log, run_id=run.run_id, attempt=run.attempt, rank=run.rank),
        make_console(config.progress, total_steps, epoch_at) if run.rank == 0 else None,
        *trackers,
        PrometheusEndpoint(config.prometheus_port, run) if config.prometheus_port else None,
        Spans(run) if config.opentelemetry else None,
    ]
    fan_out = FanOut([observer for observer in observers if observer])
    ranks = parse_ranks("profile_ranks", config.profile_ranks)
    if ranks is None or run.rank in ranks:
        fan_out.observers.append(profiler.Profiler(parse_profile_steps(config.profile_steps), run, fan_out))
    else:
        profiler.ignore_signal()
    return fan_out
