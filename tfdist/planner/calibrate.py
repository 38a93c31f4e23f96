"""Replaces assumptions by measurements of finished runs: how fast this machine computes and communicates.

A run folder has the run's flags (flags.txt), its workers and replicas, and how long its steps took (logs/rank-0.jsonl).
The step times of the runs are fitted to

    seconds = crowding x (fixed + work / rate + traffic / beta)

where work is in operations on one device, traffic in bytes per step, and crowding is the number of workers that share a
processor. The fit is least squares over relative errors, with no negative term. One run gives only the rate; runs of
two sizes also give the fixed cost; a run with several workers also gives the bandwidth. Terms that the runs cannot
separate keep their assumed values.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tfdist import flags
from tfdist.config import Config
from tfdist.config.mesh_degrees import cuts_of_weights
from tfdist.config.strategies import is_own, strategy_or_undecided
from tfdist.control.exit_codes import ConfigError
from tfdist.planner.hardware import Hardware
from tfdist.planner.layout import Layout
from tfdist.planner.least_squares import fit
from tfdist.planner.memory import KERAS
from tfdist.planner.shapes import ModelShape
from tfdist.storage.reader_copy import ReadRun
from tfdist.telemetry.jsonl import read_jsonl, steady_values


@dataclass(frozen=True)
class Measured:
    """The measurements in a run folder."""

    folder: str
    config: Config
    workers: int
    replicas: int
    step_s: float  # median over the log's intervals


def read_run(folder: str) -> Measured:
    """Reads a run folder. Raises ConfigError if it is not one, has too few log lines for a measurement, or is of a run
    that `terms` does not describe."""
    place = ReadRun(folder, flag="calibrate").bring()
    log = place / "logs" / "rank-0.jsonl"
    try:
        config = flags.parse([f"--flagfile={place / flags.FLAGS_FILE}"]).config
        records = list(read_jsonl(log))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--calibrate={folder} is not a run folder that can be read ({error}): give the --run_dir of a"
            " finished run."
        ) from None
    _check_data_parallel(folder, config)
    attempt = max((record["attempt"] for record in records), default=0)
    records = [record for record in records if record["attempt"] == attempt]
    start = next((record["values"] for record in records if record["kind"] == "start"), {})
    rates = steady_values(records, "perf/steps_per_s")
    if not rates or not all(type(start.get(name)) is int and start[name] > 0 for name in ("workers", "replicas")):
        raise ConfigError(
            f"--calibrate={folder} contains fewer than two log lines of its last attempt: train for longer, or lower"
            " --log_every."
        )
    return Measured(folder, config, start["workers"], start["replicas"], 1 / statistics.median(rates))


def _check_data_parallel(folder: str, config: Config) -> None:
    """Raises ConfigError if more than samples is divided over the workers, a pass is made twice, or gradients travel in
    another form than `terms` counts."""
    name, parallel = config.strategy.strategy, config.parallel
    found = (
        f"--strategy={name}" if not is_own(name) and strategy_or_undecided(name).parameter_servers else "",
        f"--mesh={parallel.mesh}" if cuts_of_weights(parallel.mesh) else "",
        f"--zero={parallel.zero}" if parallel.zero else "",
        f"--recompute={parallel.recompute}" if parallel.recompute != "none" else "",
        f"--compression={parallel.compression}" if parallel.compression != "none" else "",
        f"--horovod_compression={config.strategy.horovod_compression}"
        if config.strategy.horovod_compression != "none"
        else "",
    )
    if any(found):
        raise ConfigError(
            f"--calibrate={folder} was trained with {' '.join(filter(None, found))}: give runs whose workers have the"
            " whole model, share out samples only, and send gradients as they are."
        )


class Terms(NamedTuple):
    """The terms to which the step time is fitted, for one step on the slowest device."""

    fixed: float
    operations: float
    traffic: float  # bytes


def terms(model: ModelShape, replicas: int, global_batch: int, hardware: Hardware) -> Terms:
    """Returns the terms for data parallelism only, multiplied by the crowding if workers share processors."""
    layout = Layout(data=replicas, micro_batch=-(-global_batch // replicas))
    crowding = hardware.crowding(replicas)
    traffic = 2 * (replicas - 1) / replicas * KERAS.gradient * model.parameters
    return Terms(crowding, crowding * 3 * model.flops * layout.micro_batch, crowding * traffic)


def calibrate(hardware: Hardware, runs: Sequence[Measured], shape: Callable[[Config], ModelShape]) -> Hardware:
    """Returns `hardware` with measured efficiency, fixed cost and bandwidth, as far as the runs determine them.

    Raises ConfigError unless all runs have the same precision.
    """
    precisions = {run.config.precision.precision for run in runs}
    if len(precisions) > 1:
        raise ConfigError(f"--calibrate got runs in {' and '.join(sorted(precisions))}: give runs of one precision.")
    rows = [terms(shape(run.config), run.replicas, run.config.batch.global_batch, hardware) for run in runs]
    peak = hardware.tflops(precisions.pop()) * 1e12
    known = Terms(hardware.step_ms * 1e-3, 1 / (peak * hardware.efficiency), 1 / (_bandwidth(hardware) * 1e9))
    free = ["operations"]  # one run: only the rate
    if len({row.operations for row in rows}) > 1:
        free = ["fixed", "operations"]
    if any(row.traffic for row in rows) and len(rows) > len(free):
        free = [*free, "traffic"]
    found = fit(rows, [run.step_s for run in runs], known, free)
    measured = dataclasses.replace(hardware, step_ms=found.fixed * 1e3, efficiency=1 / (found.operations * peak))
    if "traffic" not in free:
        return measured
    return dataclasses.replace(
        measured,
        overlap=0.0,
        network_gbs=1e-9 / found.traffic / hardware.cards,
        link_gbs=1e-9 / found.traffic,
        network_us=0.0,
        link_us=0.0,
    )


def _bandwidth(hardware: Hardware) -> float:
    return hardware.node_gbs if hardware.per_node == 1 else min(hardware.link_gbs, hardware.node_gbs)
