"""A run's report as text, and the words that text report and page share."""

from __future__ import annotations

from tfdist.control.amounts_text import long_time
from tfdist.telemetry.goodput import PARTS, Goodput
from tfdist.telemetry.run_log import RunLog

WORDS = {
    "train": ("training", "steps that were kept"),
    "lost": ("lost steps", "done again, or never kept"),
    "restart": ("restarts", "from the last event before a death to the first new step"),
    "startup": ("start-up", "imports, building, restoring, opening the data"),
    "trace": ("first steps", "time for tracing and compiling"),
    "evaluation": ("evaluation", "training stood still"),
    "saving": ("saving", "training stood still"),
    "results": ("results", "export, picture, summary"),
    "idle": ("idle", "after finished training, until it was resumed"),
    "other": ("other", "not explained by the log"),
}
_RESTART_WORDS = {
    "failure": "waiting for what failed",
    "down": "down",
    "startup": "start-up",
    "trace": "first steps",
}


def restart_detail(goodput: Goodput) -> str:
    """Returns a phrase about the parts of restarts; "" if there were none."""
    return ", ".join(
        f"{seconds:.1f} s {_RESTART_WORDS[within]}" for within, seconds in goodput.restart_parts.items() if seconds
    )


def as_text(run: RunLog) -> str:
    """Returns the run's facts and goodput as lines of text."""
    goodput = run.goodput
    lines = [f"{run.name} ({run.folder})"]
    lines += [
        f"  {name:<22}{text}" for name, text in run.facts().items() if text and name not in ("wall time", "goodput")
    ]
    lines += ["", f"  {'goodput':<22}{100 * goodput.fraction:.1f} % of {goodput.wall_s:.1f} s"]
    for part, seconds in goodput.parts.items():
        if seconds or part in PARTS[:3]:
            word, meaning = WORDS[part]
            detail = restart_detail(goodput) if part == "restart" and seconds else meaning
            lines.append(
                f"    {word:<14}{seconds:>10.1f} s {100 * seconds / max(goodput.wall_s, 1e-9):>6.1f} %   {detail}"
            )
    begin = goodput.spans[0].begin if goodput.spans else 0.0
    for restart in goodput.restarts:
        lines.append(
            f"  restart of attempt {restart.attempt} after {long_time(restart.died - begin)}, from step"
            f" {restart.from_step:,} to {restart.to_step:,}: {restart.reason}"
        )
    return "\n".join(lines)
