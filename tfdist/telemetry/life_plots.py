"""Two plots of the report: how the runs' lifetimes were spent, as shares and along time. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.lines import Line2D

from tfdist.telemetry.goodput import PARTS, Span
from tfdist.telemetry.plot_style import PART_COLORS, as_svg, label_rows, legend_above, one_plot, styled
from tfdist.telemetry.run_log import RunLog

_MARKS = {
    "start": ("^", "#333333"),
    "warning": ("d", "#e0a100"),
    "error": ("X", "#b8302a"),
    "end": ("s", "#333333"),
    "save": ("|", "#a03a8c"),
    "backup": ("|", "#a03a8c"),
}


@styled
def goodput_bars(runs: Sequence[RunLog]) -> str:
    """Plots a bar per run: the shares of its lifetime."""
    figure, axis = one_plot(11, 0.95 + 0.42 * len(runs))
    shown = [part for part in PARTS if any(run.goodput.parts[part] > 0 for run in runs)]
    for row, run in enumerate(runs):
        left, wall = 0.0, max(run.goodput.wall_s, 1e-9)
        for part in shown:
            share = 100 * run.goodput.parts[part] / wall
            axis.barh(row, share, left=left, color=PART_COLORS[part], height=0.66)
            if share >= 5:
                dark = part not in ("trace", "idle", "other", "results")
                axis.text(
                    left + share / 2,
                    row,
                    f"{share:.0f} %",
                    ha="center",
                    va="center",
                    color="white" if dark else "#333333",
                    fontsize=9,
                )
            left += share
    axis.set(xlim=(0, 100), xlabel="share of the wall time (%)")
    label_rows(axis, [run.name for run in runs])
    legend_above(figure, shown)
    return as_svg(figure, "goodput by run")


@styled
def time_line(runs: Sequence[RunLog]) -> str:
    """Plots what each run did at which time, with its events as marks above."""
    figure, axis = one_plot(11, 1.15 + 0.62 * len(runs))
    longest = max(run.goodput.wall_s for run in runs)
    unit, per_unit = ("h", 3600) if longest > 2 * 3600 else ("min", 60) if longest > 300 else ("s", 1)
    used = [part for part in PARTS if any(run.goodput.parts[part] > 0 for run in runs)]
    for row, run in enumerate(runs):
        spans = run.goodput.spans
        begin = spans[0].begin if spans else 0.0
        for part in used:
            bars = [
                (start / per_unit, length / per_unit)
                for found, start, length in _cells(spans, begin, longest / 1500 or 1.0)
                if found == part
            ]
            axis.broken_barh(bars, (row - 0.2, 0.5), color=PART_COLORS[part], linewidth=0)
        for seconds, record in run.timed("start", "warning", "error", "end", "save", "backup"):
            mark, tint = _MARKS[record["kind"]]
            axis.plot(seconds / per_unit, row - 0.34, marker=mark, color=tint, markersize=5, linestyle="none")
    kinds = [kind for kind in _MARKS if kind != "backup" and any(run.of_kind(kind) for run in runs)]
    marks = [
        Line2D(
            [],
            [],
            marker=_MARKS[kind][0],
            color=_MARKS[kind][1],
            linestyle="none",
            markersize=5,
            label="snapshot" if kind == "save" else kind,
        )
        for kind in kinds
    ]
    axis.set(xlabel=f"time since the first process was started ({unit})", xlim=(0, longest / per_unit * 1.005 or 1))
    label_rows(axis, [run.name for run in runs], low=0.5)
    legend_above(figure, used, marks)
    return as_svg(figure, "time line of the runs")


def _cells(spans: Sequence[Span], begin: float, width: float) -> list[tuple[str, float, float]]:
    """Returns (part, start, length) in seconds since `begin`: for every `width` seconds the part that took most of
    them. Equal neighbors are joined, so that a long run stays a small picture."""
    shares: dict[int, dict[str, float]] = {}
    for piece in spans:
        first, last = int((piece.begin - begin) / width), int((piece.end - begin) / width)
        for cell in range(first, last + 1):
            overlap = min(piece.end - begin, (cell + 1) * width) - max(piece.begin - begin, cell * width)
            shares.setdefault(cell, {})[piece.part] = shares.get(cell, {}).get(piece.part, 0.0) + overlap
    found: list[tuple[str, float, float]] = []
    for cell, parts in sorted(shares.items()):
        part, length = max(parts, key=parts.__getitem__), sum(parts.values())
        if found and found[-1][0] == part:
            found[-1] = (part, found[-1][1], found[-1][2] + length)
        else:
            found.append((part, cell * width, length))
    return found
