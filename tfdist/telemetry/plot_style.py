"""The look of all plots of the report: their colors, and figures as SVG text. Needs matplotlib.

A run keeps its color in all plots. Curves of more than 600 points are drawn as means over intervals of steps, with the
range of each interval as a band.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tfdist.telemetry.report_text import WORDS

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
_MOST_POINTS = 600
_STYLE: Any = {
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
styled = matplotlib.rc_context(_STYLE)  # also works as a decorator


def color(number: int) -> str:
    """Returns the color of run number `number`."""
    return RUN_COLORS[number % len(RUN_COLORS)]


def one_plot(width: float, height: float) -> tuple[Figure, Axes]:
    """Returns a figure with one plot; width and height in inches."""
    figure = Figure(figsize=(width, height))
    return figure, figure.subplots()


def as_svg(figure: Figure, title: str) -> str:
    """Returns the figure as an <svg> element whose ids do not clash with those of other figures in the page."""
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


def draw_line(axis: Axes, points: Sequence[tuple[float, float]], **how) -> None:
    """Draws a curve; if it has too many points, means over intervals with their range as a band."""
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


def label_rows(axis: Axes, names: Sequence[str], low: float = 0.5) -> None:
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -low)  # the first on top
    axis.grid(False, axis="y")
    axis.tick_params(axis="y", length=0)


def legend_above(figure: Figure, parts: Sequence[str], marks: Sequence = ()) -> None:
    figure.legend(
        handles=[*(Patch(color=PART_COLORS[part], label=WORDS[part][0]) for part in parts), *marks],
        loc="outside upper left",
        ncols=10,
        fontsize=9,
        handlelength=1,
        columnspacing=1.2,
    )
