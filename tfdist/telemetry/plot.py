"""Draws the curves of a run as a picture, from its JSONL log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tfdist.control import optional_packages
from tfdist.control.exit_codes import ConfigError, UnsupportedError
from tfdist.control.own_files import written_whole
from tfdist.telemetry.jsonl import history, read_jsonl

_BLUE, _ORANGE, _GRAY = "#1f5fa8", "#d9730d", "#777777"


def draw_curves(log: Path, picture: Path, reference: Mapping[str, float] | None) -> str:
    """Draws loss, accuracy (or perplexity, or gradient norm), throughput and learning rate over steps.

    log: a rank-0.jsonl. reference: label -> loss, drawn as dashed lines. Returns "", or why there is no picture.
    """
    try:
        pyplot = optional_packages.pyplot("--plot")
    except UnsupportedError as error:
        return f"no picture: {error}, or use --noplot"
    try:
        series = read_series(log)
    except ConfigError as error:  # the log cannot be read, but a finished training must not fail
        return f"no picture: {error}"
    if not any(series.values()):
        return "no picture: the log has no steps yet"
    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8), dpi=100, sharex=True)
    second = next(
        (name for name in ("accuracy", "perplexity") if f"train/{name}" in series or f"eval/{name}" in series),
        "gradient_norm",
    )
    _panel(axes[0, 0], series, {"train/loss": "training", "eval/loss": "evaluation"}, "loss")
    for label, value in (reference or {}).items():
        axes[0, 0].axhline(value, color=_GRAY, linestyle="--", linewidth=1)
        axes[0, 0].annotate(
            f"{label} {value:.2f}",
            (0.99, value),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            color=_GRAY,
            fontsize=9,
        )
    _panel(
        axes[0, 1], series, {f"train/{second}": "training", f"eval/{second}": "evaluation"}, second.replace("_", " ")
    )
    _panel(axes[1, 0], series, {"perf/samples_per_s": ""}, "throughput (samples/s)")
    _panel(axes[1, 1], series, {"train/learning_rate": ""}, "learning rate")
    axes[1, 0].set_ylim(bottom=0)
    for panel in axes[1]:
        panel.set_xlabel("optimizer step")
    figure.suptitle(log.resolve().parent.parent.name, fontsize=12)
    figure.tight_layout()
    try:
        with written_whole(picture, "wb", aside=f".{picture.name}.writing") as file:
            figure.savefig(file, format="png")
    except OSError as error:  # a missing picture must not make a finished training fail
        return f"no picture: {error}"
    finally:
        pyplot.close(figure)
    return ""


def read_series(log: Path) -> dict[str, dict[int, float]]:
    """See `series_of`."""
    return series_of(read_jsonl(log))


def series_of(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Returns name -> {step: value} from the records' history (jsonl.py)."""
    series: dict[str, dict[int, float]] = {}
    for record in history(records):
        for name, value in record["values"].items():
            if isinstance(value, (int, float)):
                series.setdefault(name, {})[record["step"]] = float(value)
    return series


def _panel(axis, series: dict, names: Mapping[str, str], label: str) -> None:
    for (name, legend), color in zip(names.items(), (_BLUE, _ORANGE), strict=False):
        points = sorted(series.get(name, {}).items())
        if points:
            axis.plot(
                *zip(*points, strict=True),
                color=color,
                label=legend,
                linewidth=1.8,
                marker="o" if len(points) < 15 else None,
                markersize=4,
            )
    axis.set_ylabel(label)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if any(names.values()) and axis.lines:
        axis.legend(frameon=False)
