"""Makes job files for Slurm and Kubernetes, and a Dockerfile, from the templates in this folder.

In a template, {{name}} is replaced by its value. A line that begins with {{?name}} is kept only if `name` is not empty.
All lines of a multi-line value get the indent of the first.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from importlib import resources

from tfdist.control.exit_codes import RESTARTABLE, ExitCode

_PLACE = re.compile(r"\{\{(\w+)\}\}")
_ONLY_IF = re.compile(r"^\{\{\?(\w+)\}\}")

RESTART_CODES = sorted(code.value for code in RESTARTABLE if code != ExitCode.PREEMPTED)
FATAL_CODES = sorted(code.value for code in ExitCode if code != ExitCode.OK and code not in RESTARTABLE)


def render(template: str, values: Mapping[str, object]) -> str:
    """Returns the filled text of a template in this folder. Raises KeyError for a name that `values` lacks."""
    codes = {
        "preempted": ExitCode.PREEMPTED.value,
        "fatal_codes": ", ".join(map(str, FATAL_CODES)),
        "restart_pattern": "|".join(map(str, RESTART_CODES)),
        "restart_or_preempted_pattern": "|".join(map(str, [*RESTART_CODES, ExitCode.PREEMPTED.value])),
    }
    return fill((resources.files(__name__) / f"{template}.template").read_text(encoding="utf-8"), {**codes, **values})


def fill(text: str, values: Mapping[str, object]) -> str:
    """Fills the placeholders in `text`; see the module docstring."""
    lines = []
    for line in text.splitlines():
        condition = _ONLY_IF.match(line)
        if condition and values[condition.group(1)] in ("", 0, None):
            continue
        line = line[condition.end() :] if condition else line
        indent = line[: len(line) - len(line.lstrip())]
        lines.append(
            _PLACE.sub(lambda match, indent=indent: str(values[match.group(1)]).replace("\n", f"\n{indent}"), line)
        )
    return "\n".join(lines) + "\n"


def bash_word(text: str) -> str:
    """Quotes a text as one word for bash, on one line: `fill` would add an indent after a line break in it."""
    if text.isprintable():
        return shlex.quote(text)
    special = {"\\": "\\\\", "'": "\\'"}
    return (
        "$'"
        + "".join(
            special.get(one, one) if one.isprintable() else "".join(f"\\x{byte:02x}" for byte in one.encode())
            for one in text
        )
        + "'"
    )


def quoted_list(items: Sequence[str]) -> str:
    """Formats texts as a YAML block list; JSON strings are valid YAML strings."""
    return "\n".join(f"- {json.dumps(item)}" for item in items)
