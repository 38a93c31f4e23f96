"""Shows measured collectives as a table, a CSV file and pictures."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tfdist.communication.alpha_beta import ALGORITHMS, Line, errors, explain, fit_line, show_rate, split
from tfdist.communication.measurement import Measurement
from tfdist.control import optional_packages

COLUMNS = (
    "runtime",
    "members",
    "collective",
    "through",
    "bytes",
    "seconds",
    "algorithm_gbs",
    "bus_gbs",
    "predicted_seconds",
    "in_fit",
)
FEWEST = 4  # number of sizes for a fit that can be checked
_BLUE, _ORANGE, _GRAY = "#1f5fa8", "#d9730d", "#666666"


@dataclass(frozen=True)
class Series:
    """The measurements of one collective of a runtime at one number of members, for several sizes."""

    runtime: str
    through: str  # what carried the bytes
    measurements: Sequence[Measurement]  # in order of size, not empty

    @property
    def collective(self) -> str:
        return self.measurements[0].collective

    @property
    def members(self) -> int:
        return self.measurements[0].members

    def held_out(self) -> list[Measurement]:
        return split(self.measurements)[1]

    def line(self) -> Line | None:
        """The line fitted to the sizes that are not held out; None if there are too few sizes."""
        return fit_line(split(self.measurements)[0]) if len(self.measurements) >= FEWEST else None


def table(series: Series) -> str:
    """The measurements, the fitted line with its errors, and the link that each algorithm implies."""
    line, held = series.line(), series.held_out()
    lines = [
        "",
        f"{series.collective}, {series.runtime}, {series.members} members, through {series.through}",
        f"{'bytes':>12} {'us':>12} {'alg GB/s':>10} {'bus GB/s':>10}"
        + (f" {'fit us':>12} {'error':>7}" if line else ""),
    ]
    for one in series.measurements:
        row = (
            f"{one.size:12,} {one.seconds * 1e6:12.1f} {one.algorithm_bandwidth / 1e9:10.3f}"
            f" {one.bus_bandwidth / 1e9:10.3f}"
        )
        if line:
            row += (
                f" {line.seconds(one.size) * 1e6:12.1f}"
                f" {line.seconds(one.size) / one.seconds - 1:+7.0%}{'  held out' if one in held else ''}"
            )
        lines.append(row)
    if line:
        off = [abs(error) for error in errors(lambda one: line.seconds(one.size), held)]
        lines.append(
            f"fit: {line.describe()}; {sum(error <= 0.25 for error in off)} of {len(off)} sizes held out within 25 %,"
            f" worst {max(off):.0%}"
        )
        lines += explanations(series.collective, series.measurements)
    return "\n".join([*lines, ""])


def explanations(collective: str, measurements: Sequence[Measurement]) -> list[str]:
    """A line for each algorithm: the link that it would need, and its error, which distinguishes algorithms only over
    several numbers of members.
    """
    several = len({one.members for one in measurements}) > 1
    return [
        f"  as {found.algorithm}: a link of {found.link.alpha * 1e6:.1f} us and {show_rate(found.link.beta)}"
        + (f", median error {found.error:.0%}" if several else "")
        for found in explain(collective, measurements)
    ]


def write_csv(path: Path, results: Sequence[Series]) -> None:
    """Writes one row per measurement."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for series in results:
            line, held = series.line(), series.held_out()
            for one in series.measurements:
                writer.writerow(
                    {
                        "runtime": series.runtime,
                        "members": one.members,
                        "collective": one.collective,
                        "through": series.through,
                        "bytes": one.size,
                        "seconds": one.seconds,
                        "algorithm_gbs": f"{one.algorithm_bandwidth / 1e9:.6f}",
                        "bus_gbs": f"{one.bus_bandwidth / 1e9:.6f}",
                        "predicted_seconds": f"{line.seconds(one.size):.9f}" if line else "",
                        "in_fit": int(one not in held) if line else "",
                    }
                )


def read_csv(path: Path) -> list[Series]:
    """Reads the file that `write_csv` wrote."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = [
            (
                row["runtime"],
                row["through"],
                Measurement(row["collective"], int(row["members"]), int(row["bytes"]), float(row["seconds"])),
            )
            for row in csv.DictReader(file)
        ]
    return [
        Series(runtime, through, [one for _, _, one in group])
        for (runtime, through, _, _), group in groupby(
            rows, key=lambda row: (*row[:2], row[2].collective, row[2].members)
        )
    ]


def draw(path: Path, results: Sequence[Series]) -> None:
    """Draws time and bus bandwidth over size, one column per collective."""
    pyplot = optional_packages.pyplot("a picture")
    figure, axes = pyplot.subplots(
        2, len(results), figsize=(4.0 * len(results), 7), dpi=100, squeeze=False, sharex="col"
    )
    for (upper, lower), series in zip(axes.T, results, strict=True):
        held, line = series.held_out(), series.line()
        for label, part, marker in (
            ("in the fit", [one for one in series.measurements if one not in held], "o"),
            ("held out", held, "x"),
        ):
            upper.plot(
                [one.size for one in part], [one.seconds * 1e3 for one in part], marker, color=_BLUE, label=label
            )
        lower.plot(
            [one.size for one in series.measurements],
            [one.bus_bandwidth / 1e9 for one in series.measurements],
            "o-",
            color=_BLUE,
            markersize=4,
        )
        if line:
            upper.plot(
                [one.size for one in series.measurements],
                [line.seconds(one.size) * 1e3 for one in series.measurements],
                color=_ORANGE,
                label=line.describe().replace("; ", "\n"),
            )
        upper.set(xscale="log", yscale="log", ylabel="milliseconds", title=f"{series.collective}\n{series.through}")
        upper.legend(frameon=False, fontsize=7)
        lower.set(xscale="log", ylim=(0, None), xlabel="bytes", ylabel="bus bandwidth, GB/s")
    _finish(figure, axes, f"{results[0].runtime}, {results[0].members} members", path)
    pyplot.close(figure)


def draw_models(path: Path, together: Sequence[Series]) -> None:
    """Draws time over size at several numbers of members, one panel per collective, each with the one link that best
    explains all of them."""
    pyplot = optional_packages.pyplot("a picture")
    names = list(dict.fromkeys(series.collective for series in together))
    figure, axes = pyplot.subplots(1, len(names), figsize=(4.0 * len(names), 4), dpi=100, squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        some = [series for series in together if series.collective == name]
        best = explain(name, [one for series in some for one in series.measurements])[0]
        for series, marker in zip(some, "os^Dv*" * len(some), strict=False):
            sizes = [one.size for one in series.measurements]
            axis.plot(
                sizes,
                [one.seconds * 1e3 for one in series.measurements],
                marker,
                color=_BLUE,
                markersize=4,
                label=f"{series.members} members",
            )
            axis.plot(
                sizes,
                [ALGORITHMS[name][best.algorithm](series.members, size, best.link) * 1e3 for size in sizes],
                color=_GRAY,
                linewidth=1,
            )
        axis.plot(
            [], [], color=_GRAY, label=f"{best.algorithm}: {best.link.alpha * 1e6:.0f} us, {show_rate(best.link.beta)}"
        )
        axis.set(xscale="log", yscale="log", xlabel="bytes", ylabel="milliseconds", title=name)
        axis.legend(frameon=False, fontsize=8)
    _finish(figure, axes, together[0].runtime, path)
    pyplot.close(figure)


def _finish(figure, axes, title: str, path: Path) -> None:
    for axis in axes.flat:
        axis.grid(alpha=0.25)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path)
