"""The plots of the report (more of them in life_plots.py), each as SVG text to insert into a page. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from tfdist.control.amounts_text import bytes_with_unit, counted, short_time
from tfdist.telemetry.plot_style import as_svg, color, draw_line, label_rows, one_plot, styled
from tfdist.telemetry.run_log import RunLog, quantile

_PHASE_COLORS = {
    "data_wait": "#d9730d",
    "host_to_device": "#e0a100",
    "forward": "#2a8c6a",
    "forward_backward": "#2a8c6a",
    "backward": "#1f5fa8",
    "gradient_sync": "#b8302a",
    "optimizer": "#5a4fcf",
    "other": "#9a9a9a",
    "checkpoint": "#a03a8c",
    "evaluation": "#7d8fa9",
}


@styled
def curves(
    runs: Sequence[RunLog], names: Mapping[str, str], label: str, *, log: bool = False, from_zero: bool = False
) -> str:
    """Plots values over steps, all runs in one plot. names: series -> legend; the first is solid, the second dashed.

    Returns "" if no run has any of them.
    """
    if not any(run.series.get(name) for run in runs for name in names):
        return ""
    figure, axis = one_plot(5.4, 3.1)
    for number, run in enumerate(runs):
        for (name, legend), style in zip(names.items(), ("-", "--"), strict=False):
            points = sorted(run.series.get(name, {}).items())
            if points:
                text = ", ".join(part for part in (run.name if len(runs) > 1 else "", legend) if part)
                draw_line(axis, points, color=color(number), linestyle=style, label=text)
    axis.set(xlabel="optimizer step", ylabel=label)
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    values = [value for line in axis.lines for value in np.asarray(line.get_ydata())]
    if log and min(values) > 0 and max(values) > 10 * min(values):
        axis.set_yscale("log")
    if from_zero:
        axis.set_ylim(bottom=0)
    if len(axis.lines) > 1:
        axis.legend(fontsize=9)
    return as_svg(figure, label)


@styled
def step_times(runs: Sequence[RunLog]) -> str:
    """Plots the distribution of the time per step."""
    found = [(number, run, run.step_seconds()) for number, run in enumerate(runs)]
    found = [(number, run, times) for number, run, times in found if times]
    if not found:
        return ""
    figure, axis = one_plot(5.4, 3.1)
    low = min(value for _, _, times in found for value, _ in times)
    most = max(quantile(times, 0.99) for _, _, times in found)
    wide = most > 8 * low
    bins = max(8, min(40, max(len(times) for _, _, times in found) // 4))
    edges = [
        low * 0.98 * (most * 1.04 / low) ** (k / bins) if wide else low * 0.98 + (most * 1.04 - low) * k / bins
        for k in range(bins + 1)
    ]
    for number, run, times in found:
        total = sum(steps for _, steps in times)
        axis.hist(
            [min(value, edges[-1]) for value, _ in times],
            bins=edges,
            weights=[100 * steps / total for _, steps in times],
            color=color(number),
            alpha=0.35 if len(found) > 1 else 0.7,
            label=run.name,
            histtype="stepfilled",
        )
        axis.axvline(quantile(times, 0.5), color=color(number), linewidth=1.5)
    if wide:
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
        axis.xaxis.set_minor_formatter(NullFormatter())
    else:
        axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_time(value)))
    axis.set(xlabel="time per step, mean over a log interval (line: median)", ylabel="steps (%)")
    if len(found) > 1:
        axis.legend(fontsize=9)
    return as_svg(figure, "distribution of step times")


@styled
def phases(run: RunLog) -> str:
    """Plots a bar per rank: mean seconds of each phase, end to end; hatched: reduction hidden by the backward
    pass.
    """
    if not run.phases:
        return ""
    figure, axis = one_plot(5.4, 1.8 + 0.3 * len(run.phases))
    names = list(dict.fromkeys(name for values in run.phases.values() for name in values))
    left = [0.0] * len(run.phases)
    for name in names:
        if name == "gradient_sync":
            hidden = [1000 * run.overlaps.get(rank, {}).get(name, 0.0) for rank in run.phases]
            if any(hidden):
                axis.barh(
                    range(len(left)),
                    hidden,
                    left=[edge - width for edge, width in zip(left, hidden, strict=True)],
                    height=0.3,
                    fill=False,
                    hatch="////",
                    edgecolor=_PHASE_COLORS[name],
                    linewidth=0,
                    label="gradient sync, hidden",
                    zorder=3,
                )
        widths = [1000 * values.get(name, 0.0) for values in run.phases.values()]
        axis.barh(
            range(len(left)),
            widths,
            left=left,
            height=0.66,
            label=name.replace("_", " "),
            color=_PHASE_COLORS.get(name, "#c9a8d6"),
        )
        left = [edge + width for edge, width in zip(left, widths, strict=True)]
    axis.set(xlabel="mean per step (ms)")
    label_rows(axis, [f"rank {rank}" for rank in run.phases])
    figure.legend(loc="outside upper center", ncols=4, fontsize=9)
    return as_svg(figure, f"phases by rank of {run.name}")


@styled
def stragglers(run: RunLog) -> str:
    """Plots the compute seconds per step of the median and the slowest worker, and which worker is the slowest."""
    middle, slowest, ranks = (
        sorted(run.series.get(f"perf/{name}", {}).items())
        for name in ("compute_s", "slowest_compute_s", "slowest_rank")
    )
    if not slowest:
        return ""
    figure, axis = one_plot(5.4, 3.1)
    draw_line(axis, [(step, 1000 * value) for step, value in slowest], color="#b8302a", label="slowest worker")
    draw_line(axis, [(step, 1000 * value) for step, value in middle], color="#1f5fa8", label="median worker")
    axis.set(xlabel="optimizer step", ylabel="compute per step (ms)")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=9)
    counts: dict[int, int] = {}
    for _, rank in ranks:
        counts[int(rank)] = counts.get(int(rank), 0) + 1
    often = sorted(counts.items(), key=lambda item: -item[1])[:4]
    axis.set_title(
        "slowest: "
        + ", ".join(f"rank {rank} {100 * count / len(ranks):.0f} %" for rank, count in often)
        + " of the intervals"
    )
    return as_svg(figure, f"stragglers of {run.name}")


@styled
def checkpoints(run: RunLog) -> str:
    """Plots the size of snapshots and backups, and how long they took to write."""
    series = [
        (kind, [record["values"] for record in run.of_kind(kind) if "save/write_s" in record["values"]])
        for kind in ("save", "backup")
    ]
    if not any(values for _, values in series):
        return ""
    figure, axis = one_plot(5.4, 3.1)
    for (kind, values), tint in zip(series, ("#a03a8c", "#7d8fa9"), strict=True):
        if values:
            size = sum(value.get("save/bytes", 0) for value in values) / len(values)
            files = counted(len(values), "snapshot" if kind == "save" else "backup")
            axis.plot(
                [value["save/step"] for value in values],
                [value["save/write_s"] for value in values],
                "o",
                color=tint,
                markersize=4,
                label=f"{files}, mean {bytes_with_unit(size)}",
            )
    axis.set(xlabel="optimizer step", ylabel="time to write (s)")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=9)
    return as_svg(figure, f"checkpoints of {run.name}")


@styled
def memory(run: RunLog) -> str:
    """Plots the values memory/* over steps."""
    if not run.memory:
        return ""
    figure, axis = one_plot(5.4, 3.1)
    for number, (name, points) in enumerate(run.memory.items()):
        draw_line(
            axis, sorted(points.items()), color=color(number), label=name.removesuffix("_bytes").replace("_", " ")
        )
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: bytes_with_unit(value)))
    axis.set(xlabel="optimizer step", ylabel="memory")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=9)
    return as_svg(figure, f"memory of {run.name}")
