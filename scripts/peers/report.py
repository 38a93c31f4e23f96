"""The report of scripts/bench_peers.py: a table for each workload, plots, and the measurements left out.

A row is shown only if the engine did the same arithmetic: its parameters and forward FLOPs equal the workload's
formulas, and the mean loss of its first window agrees with that of the other engines with the same batch.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from datetime import UTC, datetime
from pathlib import Path

from engines import ENGINES, MODES
from workloads import WORKLOADS

LOSS_TOLERANCE = (
    1e-2  # relative; other summation orders diverge over a window, and Adam divides small gradients by small roots
)


def write(out: Path) -> str:
    """Writes OUT/peers.md and OUT/peers.png from OUT/cells/*.json. Returns the text."""
    cells = [json.loads(path.read_text()) for path in sorted((out / "cells").glob("*.json"))]
    missing = json.loads((out / "missing.json").read_text()) if (out / "missing.json").exists() else {}
    refused = [f"{_title(cell)}: {cell['error']}" for cell in cells if "error" in cell]
    good = []
    for cell in cells:
        if "error" not in cell:
            reason = _differs(cell, cells)
            refused.append(f"{_title(cell)}: {reason}") if reason else good.append(cell)
    text = [
        (
            f"Measured {datetime.now(UTC):%Y-%m-%d} on {_machine()}; load before a measurement: median"
            f" {statistics.median([cell['load'] for cell in cells] or [0]):.2f}."
        ),
        (
            "Steps per second: median (smallest to largest) of the windows. Efficiency: 2 workers against 1 of the same"
            " engine. First step: seconds from the start of the command. Memory: the largest worker. Communication:"
            " seconds per step with 2 workers less those with 1; it contains waiting for a busier memory. 'Twice': two"
            " independent jobs at once, one a core: what two workers could reach at most on this machine if"
            " communication cost nothing."
        ),
        "",
    ]
    summaries = {}
    for name in WORKLOADS:
        rows = summarize([cell for cell in good if cell["settings"]["workload"] == name])
        if rows:
            summaries[name] = rows
            text += [*_table(name, rows), ""]
    for name in WORKLOADS:
        if lines := _snapshots(
            [cell for cell in good if cell["settings"]["workload"] == name and cell["settings"]["mode"][-1] in "cr"]
        ):
            text += [f"**{name}, snapshots**", "", *lines, ""]
    text += ["- versions: " + "; ".join(sorted({cell["versions"] for cell in good}))]
    text += [f"- left out: {name}, {reason}" for name, reason in missing.items()]
    text += [f"- no row: {reason}" for reason in refused]
    document = "\n".join(text) + "\n"
    (out / "peers.md").write_text(document)
    if summaries:
        _plot(summaries, out / "peers.png")
    return document


def _title(cell: dict) -> str:
    settings = cell["settings"]
    return f"{settings['workload']}, {settings['engine']}, {MODES[settings['mode']][2]}"


def _differs(cell: dict, cells: list[dict]) -> str:
    """Returns why the cell is not comparable, or ""."""
    settings = cell["settings"]
    workload = WORKLOADS[settings["workload"]]
    for what in ("parameters", "flops"):
        if cell[what] != getattr(workload, what):
            return f"{cell[what]:,} {what} instead of {getattr(workload, what):,}"
    if settings["mode"].endswith("r"):
        return ""  # tfdist resumes with the next batch, the others with the first
    alike = [
        other["losses"][0]
        for other in cells
        if "error" not in other
        and not other["settings"]["mode"].endswith("r")
        and all(other["settings"][key] == settings[key] for key in ("workload", "world", "batch", "steps"))
    ]
    expected = statistics.median(alike)
    if abs(cell["losses"][0] - expected) > LOSS_TOLERANCE * abs(expected):
        return f"the mean loss of its first window is {cell['losses'][0]:.5f}, that of the others {expected:.5f}"
    return ""


def summarize(cells: list[dict]) -> dict[str, dict[str, dict]]:
    """Returns engine -> mode -> figures over all rounds, with efficiencies."""
    rows: dict[str, dict[str, dict]] = {}
    for name, engine in ENGINES.items():
        for mode in ("1", "2", "2s"):
            found = [cell for cell in cells if cell["settings"]["engine"] == name and cell["settings"]["mode"] == mode]
            if not found:
                continue
            rates = [rate for cell in found for rate in cell["steps_per_s"]]
            figures = {
                "rate": statistics.median(rates),
                "least": min(rates),
                "most": max(rates),
                "startup": statistics.median(cell["startup_s"] for cell in found),
                "memory": max(cell["peak_mb"] for cell in found),
            }
            alone = rows.get(engine.alone or name, {}).get("1")
            if alone and mode == "2":
                figures |= {
                    "efficiency": figures["rate"] / alone["rate"],
                    "communication": 1 / figures["rate"] - 1 / alone["rate"],
                }
            elif alone and mode == "2s":
                figures["efficiency"] = figures["rate"] / alone["rate"] / 2
            rows.setdefault(name, {})[mode] = figures
    return rows


def _table(name: str, rows: dict) -> list[str]:
    workload = WORKLOADS[name]
    lines = [
        (
            f"**{name}**: {workload.parameters / 1e6:.1f}M parameters, {workload.flops / 1e6:,.0f} MFLOP forward per"
            f" sample, {workload.batch} samples per worker, {workload.optimizer}"
        ),
        "",
        (
            "| | 1 worker, steps/s | 2 workers, steps/s | weak efficiency | communication | half batches, steps/s |"
            " strong efficiency | first step, 1 / 2 workers | memory |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for engine, modes in sorted(rows.items(), key=lambda row: -row[1].get("2", {"rate": 0})["rate"]):
        one, two, half = (modes.get(mode, {}) for mode in ("1", "2", "2s"))
        lines.append(
            f"| {engine} | {_rate(one)} | {_rate(two)} | {_share(two)} | {_milliseconds(two)} | {_rate(half)} |"
            f" {_share(half)} | {_seconds(one)} / {_seconds(two)} |"
            f" {max(figures['memory'] for figures in modes.values()):.0f} MB |"
        )
    return lines


def _snapshots(cells: list[dict]) -> list[str]:
    """Returns a table of what snapshots cost and how long a start from a snapshot takes, by engine and workers."""

    def of(engine: str, mode: str) -> list[dict]:
        return [cell for cell in cells if cell["settings"]["engine"] == engine and cell["settings"]["mode"] == mode]

    lines = []
    for engine in ENGINES:
        for workers in "21":
            if saved := of(engine, f"{workers}c"):
                lost = [seconds for cell in saved for seconds in cell["lost_s"]]
                resumed = [cell["startup_s"] for cell in of(engine, f"{workers}r")]
                lines.append(
                    f"| {engine} | {workers} | {statistics.median(lost):.2f} s ({min(lost):.2f} to {max(lost):.2f}) |"
                    f" {statistics.median(cell['snapshot_mb'] for cell in saved):.0f} MB |"
                    f" {statistics.median(cell['startup_s'] for cell in saved):.1f} s |"
                    f" {f'{statistics.median(resumed):.1f} s' if resumed else '-'} |"
                )
    return lines and [
        (
            "| | workers | training time lost per snapshot | size | first step, from nothing | first step, from a"
            " snapshot |"
        ),
        "|---|---|---|---|---|---|",
        *lines,
    ]


def _rate(figures: dict) -> str:
    return f"{figures['rate']:.3g} ({figures['least']:.3g} to {figures['most']:.3g})" if figures else ""


def _share(figures: dict) -> str:
    return f"{figures['efficiency']:.2f}" if "efficiency" in figures else ""


def _milliseconds(figures: dict) -> str:
    return f"{1000 * figures['communication']:.0f} ms" if "communication" in figures else ""


def _seconds(figures: dict) -> str:
    return f"{figures['startup']:.1f} s" if figures else "-"


def _machine() -> str:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {platform.system()}"


def _plot(summaries: dict, path: Path) -> None:
    """Plots the rates with 1 and 2 workers for each workload; the engine that is fastest with 2 is at the top."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(len(summaries), 2)
    height = -(-len(summaries) // columns)
    figure, axes = pyplot.subplots(
        height, columns, figsize=(6.5 * columns, 3.6 * height), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(summaries) :]:
        axis.set_visible(False)
    for axis, (name, rows) in zip(axes.flat, summaries.items(), strict=False):
        ordered = sorted(rows.items(), key=lambda row: [row[1].get(mode, {"rate": 0.0})["rate"] for mode in ("2", "1")])
        for offset, mode, shade in ((0.2, "1", "tab:gray"), (-0.2, "2", "tab:blue")):
            shown = [(index, modes[mode], engine) for index, (engine, modes) in enumerate(ordered) if mode in modes]
            colors = [
                (
                    "navajowhite"
                    if ENGINES[engine].apart
                    else "tab:orange"
                    if mode == "2" and engine.startswith("tfdist")
                    else shade
                )
                for *_, engine in shown
            ]
            errors = [
                [figures["rate"] - figures["least"] for _, figures, _ in shown],
                [figures["most"] - figures["rate"] for _, figures, _ in shown],
            ]
            axis.barh(
                [index + offset for index, *_ in shown],
                [figures["rate"] for _, figures, _ in shown],
                0.38,
                xerr=errors,
                color=colors,
                ecolor="black",
                error_kw={"linewidth": 0.8},
            )
        axis.set_yticks(range(len(ordered)), [engine for engine, _ in ordered], fontsize=8)
        axis.set(title=name, xlabel="steps per second of each worker")
    figure.suptitle(
        "1 worker (gray), 2 workers (blue; tfdist orange; two independent jobs, pale), one core each", fontsize=10
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
