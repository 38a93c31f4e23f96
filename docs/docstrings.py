"""The docstrings of the code are plain text: this makes reStructuredText of them for autodoc, in the same words.

Paragraphs stay paragraphs. Whatever is laid out by hand (indented lines, columns of spaces) is shown as it stands.
`code` in single backticks becomes code. Sections such as "Args:" on a line of their own are left to napoleon.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

SECTION = re.compile(r"(Args|Returns|Raises|Attributes|Yields):\s*$")

INLINE = re.compile(r"(Args|Returns|Raises): ")  # a section in a sentence: a paragraph of its own


def as_rst(lines: list[str]) -> list[str]:
    """The lines of a docstring, as reStructuredText."""
    result: list[str] = []
    in_section = False
    for paragraph in _paragraphs(lines):
        in_section = bool(SECTION.match(paragraph[0])) or (in_section and paragraph[0].startswith(" "))
        if in_section:
            result += [*map(_code, paragraph), ""]
        elif not INLINE.match(paragraph[0]) and len(fields := _fields(paragraph)) > 1:
            result += [*fields, ""]
        elif any(line.startswith(" ") or re.search(r"\S {2,}\S", line) for line in paragraph):
            result += [".. code-block:: text", "", *(f"    {line}" for line in paragraph), ""]
        else:
            result += [INLINE.sub(r"**\1**: ", line) for line in map(_code, paragraph)] + [""]
    return result


def _paragraphs(lines: list[str]) -> Iterator[list[str]]:
    current: list[str] = []
    for line in lines:
        if (SECTION.match(line) or INLINE.match(line)) and current:
            yield current
            current = []
        if line.strip():
            current.append(line)
        elif current:
            yield current
            current = []
    if current:
        yield current


def _fields(paragraph: list[str]) -> list[str]:
    """A list of "name: text", whose texts go on in indented lines, as items of a list; [] if it is something else."""
    items: list[str] = []
    for line in paragraph:
        if match := re.match(r"(\w+(?:, \w+)*): (.*)", line):
            items.append(f"- **{match.group(1)}**: {_code(match.group(2))}")
        elif line.startswith("    ") and items:
            items[-1] += " " + _code(line.strip())
        else:
            return []
    return items


def _code(line: str) -> str:
    line = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", line)
    return re.sub(r"(?<![`\\\w])(\*+)(?=\w)", lambda stars: "\\*" * len(stars.group(1)), line)


def setup(app: Any) -> None:
    """Before napoleon, which has the priority 500; but it would take "NAME: text" of an attribute for its type."""
    of_attributes: dict[str, list[str]] = {}

    def before(_: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
        lines[:] = as_rst(lines)
        if what in ("attribute", "property"):
            of_attributes[name] = list(lines)

    def after(_: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
        lines[:] = of_attributes.pop(name, lines)

    app.connect("autodoc-process-docstring", before, priority=400)
    app.connect("autodoc-process-docstring", after, priority=600)
