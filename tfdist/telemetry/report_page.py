"""The report as one HTML page: no scripts, no network, plots as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape

from tfdist.control.amounts_text import counted, long_time
from tfdist.telemetry import life_plots, plot_style
from tfdist.telemetry import report_plots as plots
from tfdist.telemetry.goodput import PARTS
from tfdist.telemetry.report_text import WORDS, restart_detail
from tfdist.telemetry.run_log import RunLog

_MOST_EVENTS = 200  # in the table of a run
_UNTOLD = "–"

_STYLE = """
:root { color-scheme: light; }
body {
  font: 15px/1.5 system-ui, sans-serif;
  color: #222;
  background: #fff;
  margin: 0 auto;
  max-width: 1160px;
  padding: 24px 20px 60px;
}
h1 { font-size: 24px; margin: 0; }
h2 { font-size: 18px; margin: 36px 0 8px; border-bottom: 1px solid #ddd; padding-bottom: 4px; }
h3 { font-size: 15px; margin: 18px 0 4px; }
p { margin: 4px 0; } .note { color: #666; font-size: 13px; }
table { border-collapse: collapse; font-size: 14px; }
th, td { text-align: left; padding: 3px 18px 3px 0; vertical-align: top; border-bottom: 1px solid #eee; }
th { font-weight: 600; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.text { overflow-wrap: break-word; }
.scroll { overflow-x: auto; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(420px, 100%), 1fr)); gap: 8px 20px; }
figure { margin: 8px 0; }
figure.wide { overflow-x: auto; }
figure.wide svg { min-width: 760px; }
figcaption { font-weight: 600; font-size: 14px; }
svg { width: 100%; height: auto; display: block; }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; }
tr.error td, tr.warning td { background: #fdf3f2; } tr.warning td { background: #fdf8e8; }
details { margin: 8px 0; } summary { cursor: pointer; } code { font-size: 13px; }
@media print { body { max-width: none; } h2 { break-after: avoid; } figure, tr { break-inside: avoid; } }
"""


def as_page(runs: Sequence[RunLog]) -> str:
    """Returns the whole page. Needs matplotlib."""
    title = " and ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs"
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    sections = [
        _summary(runs),
        _goodput(runs),
        _time_line(runs),
        _curves(runs),
        _steps(runs),
        _resources(runs),
        _events(runs),
        _configuration(runs),
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>tfdist: {escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            "</head>",
            "<body>",
            f"<h1>{escape(title)}</h1>",
            (
                f'<p class="note">tfdist report of {made}, from the logs in'
                f" {escape(', '.join(str(run.folder) for run in runs))}</p>"
            ),
            *sections,
            "</body>",
            "</html>",
            "",
        ]
    )


def _summary(runs: Sequence[RunLog]) -> str:
    facts = [run.facts() for run in runs]
    names = dict.fromkeys(name for each in facts for name in each)
    rows = [
        [name, *(each.get(name) or _UNTOLD for each in facts)]
        for name in names
        if any(each.get(name) for each in facts)
    ]
    return _section(
        "Summary",
        _table(
            ["", *(run.name for run in runs)],
            rows,
            colors=[None, *(plot_style.color(number) for number in range(len(runs)))],
        ),
    )


def _goodput(runs: Sequence[RunLog]) -> str:
    rows = []
    for part in PARTS:
        if any(run.goodput.parts[part] for run in runs) or part in PARTS[:3]:
            word, meaning = WORDS[part]
            cells = [
                f"{run.goodput.parts[part]:,.1f} s"
                f" ({100 * run.goodput.parts[part] / max(run.goodput.wall_s, 1e-9):.1f} %)"
                for run in runs
            ]
            rows.append(
                [
                    f'<span class="key" style="background:{plot_style.PART_COLORS[part]}"></span>{escape(word)}',
                    *cells,
                    f'<span class="note">{escape(meaning)}</span>',
                ]
            )
    rows.append(["all", *(f"{run.goodput.wall_s:,.1f} s" for run in runs), ""])
    details = [
        f"<p>{escape(run.name)}: {counted(len(run.goodput.restarts), 'restart')}:"
        f" {escape(restart_detail(run.goodput))}; {run.goodput.lost_steps:,} steps lost.</p>"
        for run in runs
        if run.goodput.restarts
    ]
    return _section(
        "Goodput",
        _figure(life_plots.goodput_bars(runs), wide=True),
        _table(["", *(run.name for run in runs), ""], rows, numbers=range(1, len(runs) + 1), raw=True),
        *details,
    )


def _time_line(runs: Sequence[RunLog]) -> str:
    rows = []
    for run in runs:
        begin = run.goodput.spans[0].begin if run.goodput.spans else 0.0
        rows += [
            [
                run.name,
                str(restart.attempt),
                long_time(restart.died - begin),
                f"{restart.from_step:,} → {restart.to_step:,}",
                restart.reason,
            ]
            for restart in run.goodput.restarts
        ]
    table = _table(["run", "attempt", "after", "step", "reason"], rows, numbers=(1, 2, 3))
    table = (
        f"<details{' open' if len(rows) <= 10 else ''}><summary>{counted(len(rows), 'restart')}</summary>"
        f"{table}</details>"
        if rows
        else '<p class="note">No restarts.</p>'
    )
    return _section("Time line and restarts", _figure(life_plots.time_line(runs), wide=True), table)


def _curves(runs: Sequence[RunLog]) -> str:
    quality = [
        name
        for name in ("accuracy", "perplexity")
        if any(run.series.get(f"{kind}/{name}") for run in runs for kind in ("train", "eval"))
    ]
    both = {"train/{}": "training", "eval/{}": "evaluation"}
    panels = [("Loss", plots.curves(runs, {name.format("loss"): legend for name, legend in both.items()}, "loss"))]
    panels += [
        (name.capitalize(), plots.curves(runs, {form.format(name): legend for form, legend in both.items()}, name))
        for name in quality
    ]
    panels += [
        ("Throughput", plots.curves(runs, {"perf/samples_per_s": ""}, "samples/s", from_zero=True)),
        ("Throughput in tokens", plots.curves(runs, {"perf/tokens_per_s": ""}, "tokens/s", from_zero=True)),
        ("Model FLOPs per second", plots.curves(runs, {"perf/model_flops_per_s": ""}, "model FLOP/s", from_zero=True)),
        ("MFU", plots.curves(runs, {"perf/mfu": ""}, "share of the hardware's peak", from_zero=True)),
        ("Learning rate", plots.curves(runs, {"train/learning_rate": ""}, "learning rate", from_zero=True)),
        ("Gradient norm", plots.curves(runs, {"train/gradient_norm": ""}, "gradient norm", log=True)),
    ]
    if any(len(set(run.series.get("train/loss_scale", {}).values())) > 1 for run in runs):
        panels.append(("Loss scale", plots.curves(runs, {"train/loss_scale": ""}, "loss scale", log=True)))
    return _section("Curves", _grid(panels))


def _steps(runs: Sequence[RunLog]) -> str:
    panels = [("Step times", plots.step_times(runs))]
    for run in runs:
        panels += [
            (_of("Phases by rank", run, runs), plots.phases(run)),
            (_of("Stragglers", run, runs), plots.stragglers(run)),
        ]
    return _section("Steps", _grid(panels))


def _resources(runs: Sequence[RunLog]) -> str:
    panels = [
        (_of(title, run, runs), draw(run))
        for title, draw in (("Checkpoints", plots.checkpoints), ("Memory", plots.memory))
        for run in runs
    ]
    return _section("Checkpoints and memory", _grid(panels)) if any(svg for _, svg in panels) else ""


def _events(runs: Sequence[RunLog]) -> str:
    blocks = []
    for run in runs:
        events = run.timed("start", "placement", "restore", "warning", "error", "end")
        rows = [
            [long_time(seconds), record["attempt"], record["kind"], f"{record['step']:,}", _message(record)]
            for seconds, record in events[-_MOST_EVENTS:]
        ]
        more = (
            f'<p class="note">The first {len(events) - _MOST_EVENTS:,} events are left out.</p>'
            if len(events) > _MOST_EVENTS
            else ""
        )
        table = _table(
            ["after", "attempt", "event", "step", ""], rows, numbers=(0, 1, 3), classes=[row[2] for row in rows]
        )
        blocks.append(
            f"<details{' open' if len(rows) <= 30 else ''}><summary>{escape(run.name)}: {len(events)}"
            f" events</summary>{more}{table}</details>"
        )
    return _section("Events", *blocks)


def _configuration(runs: Sequence[RunLog]) -> str:
    names = list(dict.fromkeys(name for run in runs for name in run.flags))
    if not names:
        return _section("Configuration", '<p class="note">No flags.txt in the run folder.</p>')
    rows = [[f"--{name}", *(run.flags.get(name, _UNTOLD) for run in runs)] for name in names]
    heads = ["flag", *(run.name for run in runs)]
    different = [row for row in rows if len(set(row[1:])) > 1]
    parts = []
    if len(runs) > 1:
        parts.append(
            "<h3>What differs</h3>"
            + (_table(heads, different) if different else "<p>Nothing: all runs have the same flags.</p>")
        )
    return _section(
        "Configuration", *parts, f"<details><summary>All {len(rows)} flags</summary>{_table(heads, rows)}</details>"
    )


def _message(record: dict) -> str:
    values = record["values"]
    if values.get("message"):
        return str(values["message"])
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
    )


def _of(title: str, run: RunLog, runs: Sequence[RunLog]) -> str:
    return f"{title}: {run.name}" if len(runs) > 1 else title


def _section(title: str, *parts: str) -> str:
    return "\n".join([f"<section><h2>{escape(title)}</h2>", *parts, "</section>"])


def _figure(svg: str, caption: str = "", wide: bool = False) -> str:
    title = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure{' class=wide' if wide else ''}>{title}{svg}</figure>"


def _grid(panels: Sequence[tuple[str, str]]) -> str:
    """Returns plots side by side, without those that have nothing to show."""
    return '<div class="grid">' + "\n".join(_figure(svg, caption) for caption, svg in panels if svg) + "</div>"


def _table(
    heads: Sequence[str],
    rows: Sequence[Sequence],
    *,
    numbers: Sequence[int] = (),
    classes: Sequence[str] = (),
    colors: Sequence[str | None] = (),
    raw: bool = False,
) -> str:
    """numbers: columns that are aligned to the right. colors: those of the heads. raw: the cells are HTML already."""
    tints = [*colors, *[None] * (len(heads) - len(colors))]
    top = "".join(
        f"<th{f' style=color:{tint}' if tint else ''}>{escape(head)}</th>"
        for head, tint in zip(heads, tints, strict=True)
    )
    lines = []
    for at, row in enumerate(rows):
        cells = "".join(
            f'<td class="{"number" if column in numbers else "text"}">{cell if raw else escape(str(cell))}</td>'
            for column, cell in enumerate(row)
        )
        lines.append(f"<tr{f' class={classes[at]}' if classes else ''}>{cells}</tr>")
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
