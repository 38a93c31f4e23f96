"""The flag reference, made from the flags: what stands in flags.md in place of its marker.

Every flag becomes an `option` of Sphinx: it has an anchor, and the search finds it. Run as a script
it prints the page.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from tfdist.comm import CommOptions
from tfdist.completion import parsers_before_dashes
from tfdist.config import COMPONENTS, is_switch
from tfdist.doctor import DoctorOptions
from tfdist.flags import format_flag
from tfdist.run.snapshot_evaluation import EvaluateOptions

MARKER = "<!-- flags of all commands -->"
CLASS_COMMANDS = {"evaluate": EvaluateOptions, "comm": CommOptions, "doctor": DoctorOptions}


def page() -> str:
    """All of it, as MyST Markdown."""
    return "\n".join([*_training(), *_of_classes(), *_of_parsers()])


def _training() -> Iterator[str]:
    yield from (
        "## train",
        "",
        "Also those of the workers after `--` of launch, plan and jobs, and of evaluate, comm and doctor.",
        "",
    )
    yield from ("```{program} train", "```", "")
    for name, kind in COMPONENTS.items():
        yield from (f"### {name}", "", _first_paragraph(kind), "")
        for field in dataclasses.fields(kind):
            yield from _option(field)


def _of_classes() -> Iterator[str]:
    for command, kind in CLASS_COMMANDS.items():
        yield from (f"## {command}", "", f"Beside those of train: {_first_paragraph(kind)}", "")
        yield from (f"```{{program}} {command}", "```", "")
        for field in dataclasses.fields(kind):
            yield from _option(field)


def _of_parsers() -> Iterator[str]:
    for command, parser in parsers_before_dashes().items():
        yield from (f"## {command}", "", f"```{{program}} {command}", "```", "", *_actions(parser))


def _option(field: dataclasses.Field) -> Iterator[str]:
    choices = field.metadata["choices"]
    text = _escaped(field.metadata["help"])
    if choices:
        text += f" One of: {', '.join(f'`{choice}`' for choice in choices)}."
    if field.metadata["identity"]:
        text += " *Identity.*"
    yield from (f"```{{option}} {_default(field)}", text, "```", "")


def _default(field: dataclasses.Field) -> str:
    if is_switch(field):
        return f"--{field.name}, --no{field.name}"
    return f"{format_flag(field.name, field.default)}"


def _actions(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._VersionAction) or action.help is argparse.SUPPRESS:
            continue
        value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
        names = action.option_strings or [str(value)]
        shown = names[0] if action.nargs == 0 or not action.option_strings else f"{names[0]}={value}"
        yield from (f"```{{option}} {shown}", _escaped((action.help or "").replace("%%", "%")), "```", "")


def _first_paragraph(kind: type) -> str:
    return _escaped(" ".join((kind.__doc__ or "").strip().split("\n\n")[0].split()))


def _escaped(text: str) -> str:
    """Flags and file names of a help text as code, so that Markdown leaves them alone."""
    words = []
    for word in text.split():
        core = word.strip("(),.;:")
        is_code = core.startswith("--") or "_" in core or "*" in core or "<" in core
        words.append(word.replace(core, f"`{core}`") if is_code and "`" not in word else word)
    return " ".join(words)


def setup(app: Any) -> None:
    """Puts the page in the place of its marker while Sphinx reads it."""

    def read(_: Any, name: str, source: list[str]) -> None:
        if name == "flags":
            assert MARKER in source[0], "docs/flags.md has lost its marker"
            source[0] = source[0].replace(MARKER, page())

    app.connect("source-read", read)


if __name__ == "__main__":
    sys.stdout.write(page())
