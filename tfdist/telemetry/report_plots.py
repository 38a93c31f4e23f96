"""The plots of the report, each as SVG text to be put into a page. Needs matplotlib.

A run keeps its colour in all plots. Curves of more than 600 points are drawn as means over stretches of steps, with the
range of each stretch as a band.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from tfdist.telemetry.goodput import PARTS, Span
from tfdist.telemetry.report_text import WORDS
from tfdist.telemetry.run_log import RunLog, counted, quantile, span

RUN_COLORS = ("#1f5fa8", "#d9730d", "#2a8c6a", "#a03a8c", "#6b6b6b", "#b8302a", "#5a4fcf", "#8a6d1a")
PART_COLORS = {
    "train": "#2a8c6a",
    "lost": "#d9730d",
    "restart": "#b8302a",
    "startup": "#7d8fa9",
    "trace": "#b9c4d4",
    "evaluation": "#1f5fa8",
    "saving": "#a03a8c",
    "results": "#c9a8d6",
    "idle": "#ececec",
    "other": "#c4c4c4",
}
_MARKS = {
    "start": ("^", "#333333"),
    "warning": ("d", "#e0a100"),
    "error": ("X", "#b8302a"),
    "end": ("s", "#333333"),
    "save": ("|", "#a03a8c"),
    "backup": ("|", "#a03a8c"),
}
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
_MOST_POINTS = 600
_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["system-ui", "DejaVu Sans"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "axes.titlesize": 10,
    "figure.constrained_layout.use": True,
}
_styled = matplotlib.rc_context(_STYLE)  # a decorator too


def color(number: int) -> str:
    """The colour of run number `number`."""
    return RUN_COLORS[number % len(RUN_COLORS)]


@_styled
def curves(
    runs: Sequence[RunLog], names: Mapping[str, str], label: str, *, log: bool = False, from_zero: bool = False
) -> str:
    """Values over steps, all runs in one plot; `names`: series -> legend, the first solid, the second dashed.

    "" if no run has any.
    """
    if not any(run.series.get(name) for run in runs for name in names):
        return ""
    figure, axis = _figure(5.4, 3.1)
    for number, run in enumerate(runs):
        for (name, legend), style in zip(names.items(), ("-", "--"), strict=False):
            points = sorted(run.series.get(name, {}).items())
            if points:
                text = ", ".join(part for part in (run.name if len(runs) > 1 else "", legend) if part)
                _line(axis, points, color=color(number), linestyle=style, label=text)
    axis.set(xlabel="optimizer step", ylabel=label)
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    values = [value for line in axis.lines for value in line.get_ydata()]
    if log and min(values) > 0 and max(values) > 10 * min(values):
        axis.set_yscale("log")
    if from_zero:
        axis.set_ylim(bottom=0)
    if len(axis.lines) > 1:
        axis.legend(fontsize=9)
    return _svg(figure, label)


@_styled
def goodput_bars(runs: Sequence[RunLog]) -> str:
    """A bar per run: the shares of its life."""
    figure, axis = _figure(11, 0.95 + 0.42 * len(runs))
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
    _rows(axis, [run.name for run in runs])
    _legend_above(figure, shown)
    return _svg(figure, "goodput by run")


@_styled
def time_line(runs: Sequence[RunLog]) -> str:
    """What every run did when, with its events as marks above."""
    figure, axis = _figure(11, 1.15 + 0.62 * len(runs))
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
        matplotlib.lines.Line2D(
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
    _rows(axis, [run.name for run in runs], low=0.5)
    _legend_above(figure, used, marks)
    return _svg(figure, "time line of the runs")


@_styled
def step_times(runs: Sequence[RunLog]) -> str:
    """How the steps spread over the seconds that they took."""
    found = [(number, run, run.step_seconds()) for number, run in enumerate(runs)]
    found = [(number, run, times) for number, run, times in found if times]
    if not found:
        return ""
    figure, axis = _figure(5.4, 3.1)
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
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: span(value)))
    axis.set(xlabel="time per step, mean over a log interval (line: median)", ylabel="steps (%)")
    if len(found) > 1:
        axis.legend(fontsize=9)
    return _svg(figure, "distribution of step times")


@_styled
def phases(run: RunLog) -> str:
    """A bar per rank: mean seconds of each phase, end to end; and, hatched on it, reduction that the backward pass
    hides.
    """
    if not run.phases:
        return ""
    figure, axis = _figure(5.4, 1.8 + 0.3 * len(run.phases))
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
    _rows(axis, [f"rank {rank}" for rank in run.phases])
    figure.legend(loc="outside upper center", ncols=4, fontsize=9)
    return _svg(figure, f"phases by rank of {run.name}")


@_styled
def stragglers(run: RunLog) -> str:
    """Seconds that the middle and the slowest worker compute per step, and which worker is the slowest."""
    middle, slowest, ranks = (
        sorted(run.series.get(f"perf/{name}", {}).items())
        for name in ("compute_s", "slowest_compute_s", "slowest_rank")
    )
    if not slowest:
        return ""
    figure, axis = _figure(5.4, 3.1)
    _line(axis, [(step, 1000 * value) for step, value in slowest], color="#b8302a", label="slowest worker")
    _line(axis, [(step, 1000 * value) for step, value in middle], color="#1f5fa8", label="median worker")
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
    return _svg(figure, f"stragglers of {run.name}")


@_styled
def checkpoints(run: RunLog) -> str:
    """What the snapshots and backups weighed, and how long they took to write."""
    told = [
        (kind, [record["values"] for record in run.of_kind(kind) if "save/write_s" in record["values"]])
        for kind in ("save", "backup")
    ]
    if not any(values for _, values in told):
        return ""
    figure, axis = _figure(5.4, 3.1)
    for (kind, values), tint in zip(told, ("#a03a8c", "#7d8fa9"), strict=True):
        if values:
            size = sum(value.get("save/bytes", 0) for value in values) / len(values)
            axis.plot(
                [value["save/step"] for value in values],
                [value["save/write_s"] for value in values],
                "o",
                color=tint,
                markersize=4,
                label=f"{counted(len(values), 'snapshot' if kind == 'save' else 'backup')}, mean {_bytes(size)}",
            )
    axis.set(xlabel="optimizer step", ylabel="time to write (s)")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=9)
    return _svg(figure, f"checkpoints of {run.name}")


@_styled
def memory(run: RunLog) -> str:
    """The values memory/* over steps."""
    if not run.memory:
        return ""
    figure, axis = _figure(5.4, 3.1)
    for number, (name, points) in enumerate(run.memory.items()):
        _line(axis, sorted(points.items()), color=color(number), label=name.replace("_bytes", "").replace("_", " "))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _bytes(value)))
    axis.set(xlabel="optimizer step", ylabel="memory")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=9)
    return _svg(figure, f"memory of {run.name}")


def _figure(width: float, height: float):
    figure = Figure(figsize=(width, height))
    return figure, figure.subplots()


def _svg(figure: Figure, title: str) -> str:
    """The figure as an <svg> element whose ids clash with no other's in the page."""
    stream, prefix = io.StringIO(), re.sub(r"\W+", "-", title)
    with matplotlib.rc_context({"svg.hashsalt": title}):
        figure.savefig(
            stream,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for before in (' id="', 'href="#', "url(#"):
        text = text.replace(before, f"{before}{prefix}-")
    return text.replace("<svg ", f'<svg role="img" aria-label="{_attribute(title)}" ', 1)


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


def _line(axis, points: Sequence[tuple[float, float]], **how) -> None:
    """A curve; means over stretches with their range as a band where there are too many points."""
    size = -(-len(points) // _MOST_POINTS)
    if size > 1:
        stretches = [points[at : at + size] for at in range(0, len(points), size)]
        steps = [stretch[-1][0] for stretch in stretches]
        values = [[value for _, value in stretch] for stretch in stretches]
        axis.fill_between(
            steps,
            [min(each) for each in values],
            [max(each) for each in values],
            color=how["color"],
            alpha=0.15,
            linewidth=0,
        )
        points = [(step, sum(each) / len(each)) for step, each in zip(steps, values, strict=True)]
    axis.plot(
        [step for step, _ in points],
        [value for _, value in points],
        linewidth=1.6,
        alpha=0.85,
        marker="o" if len(points) < 15 else None,
        markersize=4,
        **how,
    )


def _cells(spans: Sequence[Span], begin: float, width: float) -> list[tuple[str, float, float]]:
    """(part, start, length) in seconds since `begin`: for every `width` seconds the part that took most of them, equal
    neighbours joined, so that a long run stays a small picture."""
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


def _rows(axis, names: Sequence[str], low: float = 0.5) -> None:
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -low)  # the first on top
    axis.grid(False, axis="y")
    axis.tick_params(axis="y", length=0)


def _legend_above(figure: Figure, parts: Sequence[str], marks: Sequence = ()) -> None:
    figure.legend(
        handles=[*(Patch(color=PART_COLORS[part], label=WORDS[part][0]) for part in parts), *marks],
        loc="outside upper left",
        ncols=10,
        fontsize=9,
        handlelength=1,
        columnspacing=1.2,
    )


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
