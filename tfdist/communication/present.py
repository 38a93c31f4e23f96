"""Measured collectives as a table, a CSV file and a picture."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from tfdist.communication.fit import errors, explain, fit_line, split
from tfdist.communication.measure import Measurement

COLUMNS = ("runtime", "workers", "collective", "bytes", "seconds", "algorithm_gbs", "bus_gbs", "predicted_seconds", "in_fit")
FEWEST = 4  # sizes for a fit that can be checked


def by_collective(measurements: Iterable[Measurement]) -> Iterator[tuple[str, list[Measurement]]]:
    """(collective, its measurements in order of size); measurements of one collective must stand together."""
    for name, group in groupby(measurements, key=lambda one: one.collective):
        yield name, sorted(group, key=lambda one: one.size)


def table(runtime: str, measurements: Sequence[Measurement]) -> str:
    """All measurements, the fitted line of each collective, and what the algorithms make of it."""
    lines = []
    for name, group in by_collective(measurements):
        fitted, held = split(group)
        line = fit_line(fitted) if len(group) >= FEWEST else None
        lines += ["", f"{name}, {runtime}, {group[0].workers} workers", f"{'bytes':>12} {'us':>12} {'alg GB/s':>10} {'bus GB/s':>10} {'fit us':>12} {'error':>7}"]
        for one in group:
            predicted = f"{line.seconds(one.size) * 1e6:12.1f} {line.seconds(one.size) / one.seconds - 1:+7.0%}" if line else ""
            lines.append(f"{one.size:12,} {one.seconds * 1e6:12.1f} {one.algorithm_bandwidth / 1e9:10.3f} {one.bus_bandwidth / 1e9:10.3f} {predicted}{'  held out' if line and one in held else ''}")
        if line:
            off = [abs(error) for error in errors(lambda one, line=line: line.seconds(one.size), held)]
            lines.append(f"fit: {line.alpha * 1e6:.1f} us + bytes / {line.beta / 1e9:.3f} GB/s; {sum(error <= 0.25 for error in off)} of {len(off)} sizes held out within 25 %, worst {max(off):.0%}")
            lines += explanations(name, group)
    return "\n".join(lines)


def explanations(collective: str, measurements: Sequence[Measurement]) -> list[str]:
    """A line for each algorithm: the link that it would need, and its error."""
    return [f"  as {found.algorithm}: alpha {found.link.alpha * 1e6:.1f} us, beta {found.link.beta / 1e9:.3f} GB/s, median error {found.error:.0%}"
            for found in explain(collective, measurements)]


def write_csv(path: Path, runtime: str, measurements: Sequence[Measurement]) -> None:
    """A row per measurement."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for name, group in by_collective(measurements):
            fitted, held = split(group)
            line = fit_line(fitted) if len(group) >= FEWEST else None
            for one in group:
                writer.writerow({"runtime": runtime, "workers": one.workers, "collective": name, "bytes": one.size, "seconds": f"{one.seconds:.9f}",
                                 "algorithm_gbs": f"{one.algorithm_bandwidth / 1e9:.6f}", "bus_gbs": f"{one.bus_bandwidth / 1e9:.6f}",
                                 "predicted_seconds": f"{line.seconds(one.size):.9f}" if line else "", "in_fit": int(one not in held) if line else ""})


def read_csv(path: Path) -> list[Measurement]:
    """What `write_csv` wrote."""
    with open(path, newline="") as file:
        return [Measurement(row["collective"], int(row["workers"]), int(row["bytes"]), float(row["seconds"])) for row in csv.DictReader(file)]


def draw(path: Path, runtime: str, measurements: Sequence[Measurement]) -> str:
    """Time over size, a panel per collective, with the fit and the algorithm that explains it best. Returns "" or why there is none."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return "no picture: matplotlib is not installed"
    groups = list(by_collective(measurements))
    figure, axes = pyplot.subplots(1, len(groups), figsize=(4.2 * len(groups), 4), dpi=100, squeeze=False)
    for axis, (name, group) in zip(axes[0], groups, strict=True):
        fitted, held = split(group)
        for label, part, marker in (("in the fit", fitted, "o"), ("held out", held, "x")):
            axis.plot([one.size for one in part], [one.seconds * 1e3 for one in part], marker, color="#1f5fa8", label=label)
        if len(group) >= FEWEST:
            line = fit_line(fitted)
            axis.plot([one.size for one in group], [line.seconds(one.size) * 1e3 for one in group], color="#d9730d", linewidth=1.5,
                      label=f"{line.alpha * 1e6:.0f} us + S / {line.beta / 1e9:.2f} GB/s")
        axis.set(xscale="log", yscale="log", xlabel="bytes", ylabel="milliseconds", title=name)
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{runtime}, {measurements[0].workers} workers")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return ""
