"""The HTML page: verdicts first, then a plot and a table for each stage. One file that loads no others."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

COLORS = {"passed": "#1a7f37", "failed": "#cf222e", "left out": "#6e7781"}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1f2328 }
table { border-collapse: collapse; margin: .5rem 0 1.5rem } td, th { padding: .2rem .8rem .2rem 0; text-align: left;
vertical-align: top } th { border-bottom: 1px solid #d0d7de; font-weight: 600 } h2 { margin-top: 2rem }
td.number { text-align: right; font-variant-numeric: tabular-nums } pre { background: #f6f8fa; padding: .7rem;
overflow-x: auto; font-size: 12px } .state { font-weight: 600 } svg text { font: 12px system-ui, sans-serif }
"""
_BAR, _LABEL, _WIDTH = 18, 260, 420  # pixels


def html_of(report: Mapping[str, Any]) -> str:
    """Returns the whole page. Its contents come from other programs, so all of them are escaped."""
    results = report["stages"]
    title = "Rehearsal of the GPU acceptance, on the CPU" if report.get("rehearsal") else "GPU acceptance of tfdist"
    facts = ", ".join(f"{name} {value}" for name, value in report["machine"].items())
    body = [f"<h1>{title}</h1><p>{html.escape(facts)}</p>", _verdicts(results)]
    body += [_section(result) for result in results]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<body>{''.join(body)}</body></html>\n"
    )


def _verdicts(results: Sequence[Mapping[str, Any]]) -> str:
    rows = "".join(
        f'<tr><td>{html.escape(result["name"])}</td><td class="state" style="color:{COLORS[result["state"]]}">'
        f'{result["state"]}</td><td class="number">{result["seconds"]:.0f} s</td><td>{html.escape(result["shows"])}.'
        f" {html.escape(result['words'] if result['state'] != 'passed' else '')}</td></tr>"
        for result in results
    )
    return f"<table><tr><th>stage</th><th></th><th></th><th></th></tr>{rows}</table>"


def _section(result: Mapping[str, Any]) -> str:
    rows = result["rows"]
    text = f"<h2>{html.escape(result['name'])}</h2><p>{html.escape(result['words'])}</p>"
    if bars := [row for row in rows if isinstance(row.get("bar"), int | float)]:
        text += _bars(bars)
    if rows:
        names = list(dict.fromkeys(name for row in rows for name in row if name != "bar"))
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        text += f"<table><tr>{head}</tr>{''.join(_row(row, names) for row in rows)}</table>"
    else:
        text += f"<pre>{html.escape(chr(10).join(result['output']))}</pre>"
    return text


def _row(row: Mapping[str, Any], names: Sequence[str]) -> str:
    cells = []
    for name in names:
        value = row.get(name, "")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        shown = f"{value:,.4g}" if number else str(value)
        kind = ' class="number"' if number else ""
        cells.append(f"<td{kind}>{html.escape(shown)}</td>")
    return f"<tr>{''.join(cells)}</tr>"


def _bars(rows: Sequence[Mapping[str, Any]]) -> str:
    """Draws a bar of length `bar` per row; the first column is the label. Where rows have a "limit", each bar is scaled
    to its own limit, one line marks all limits, and a bar beyond its limit is red."""
    lengths = [row["bar"] / (row.get("limit") or 1.0) for row in rows]
    limited = any("limit" in row for row in rows)
    longest = max([*lengths, 1.0 if limited else 0.0]) or 1.0
    height, parts = len(rows) * (_BAR + 6) + 6, []
    for index, (row, part) in enumerate(zip(rows, lengths, strict=True)):
        y, length = 6 + index * (_BAR + 6), max(_WIDTH * part / longest, 1)
        color = "#cf222e" if "limit" in row and row["bar"] > row["limit"] else "#0969da"
        label = html.escape(str(next(iter(row.values())))[:44])
        parts.append(
            f'<text x="{_LABEL - 8}" y="{y + 13}" text-anchor="end">{label}</text><rect x="{_LABEL}" y="{y}"'
            f' width="{length:.1f}" height="{_BAR}" fill="{color}"/><text x="{_LABEL + length + 6:.1f}" y="{y + 13}">'
            f"{row['bar']:,.3g}</text>"
        )
    if limited:
        x = _LABEL + _WIDTH / longest
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="2" y2="{height - 2}" stroke="#cf222e"/>')
    width = _LABEL + _WIDTH + 80
    return f'<svg width="{width}" height="{height}" role="img">{"".join(parts)}</svg>'
