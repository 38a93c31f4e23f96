"""Declares and checks options, and parses their text.

A field made with `option()` is also a command-line flag of the same name (flags.py reads the fields), so a new flag
needs one such line and one line in tests/unit/flag_surface.txt.

Fields marked `identity=True` count towards `Config.digest()`: they change the numbers that a run computes (model, data
order, global batch, optimizer, ...). Options that only change where or how fast the numbers are computed (strategy,
number of workers, micro-batch, paths, logging, saving) do not count, so that a run may be resumed on another cluster.
"""

from __future__ import annotations

import ast
import dataclasses
import math
from typing import Any

from tfdist.control.command_parser import check_least, check_most
from tfdist.control.exit_codes import ConfigError


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    identity: bool = False,
    least: float | None = None,
    most: float | None = None,
    key: bool = False,
) -> Any:
    """Declares a field that is also a flag: its help text, its allowed values (or the least and the most of a number),
    whether it is part of the identity, and whether --help shows it (for the most used flags)."""
    limits = {"choices": choices, "least": least, "most": most}
    return dataclasses.field(default=default, metadata={"help": help, **limits, "identity": identity, "key": key})


def is_switch(field: dataclasses.Field) -> bool:
    """Whether an option is a switch. (The default None means: whatever suits the machine.)"""
    return field.default is None or isinstance(field.default, bool)


_LARGEST = 2**63 - 1  # the limit of a tensor's integers
LARGEST_FLOAT32, SMALLEST_FLOAT32 = 2.0**127, 2.0**-126  # powers of 2; float32 holds them without overflow or underflow


def check_option(field: dataclasses.Field, value: Any) -> None:
    """Raises ConfigError if a flag's value is not among its choices, too small, or too large."""
    choices, least = field.metadata["choices"], field.metadata["least"]
    if isinstance(value, str):
        _check_text(field.name, value)
    if choices and value not in choices:
        raise ConfigError(f"--{field.name}={value} is not one of {', '.join(choices)}.")
    if isinstance(value, float) and math.isinf(value) or type(value) is int and abs(value) > _LARGEST:
        raise ConfigError(f"--{field.name}={value} is too large: give a number that can be counted to.")
    if isinstance(value, str):
        return
    if least is not None:
        check_least(field.name, value, least)
    if field.metadata["most"] is not None:
        check_most(field.name, value, field.metadata["most"])


def check_utf8(given: str) -> None:
    """Raises ConfigError for bytes of another encoding, which no file can hold. given: a flag and its value."""
    if given.encode(errors="replace").decode() != given:
        raise ConfigError(f"{ascii(given)} is not text in UTF-8: rewrite it, or set LC_ALL=C.UTF-8 if it is.")


def _check_text(name: str, text: str) -> None:
    if text != text.rstrip() or len(text.splitlines()) > 1:
        raise ConfigError(
            f"--{name}={text!r} ends with a space or contains a line break, which no flag file can contain: remove it."
        )
    if "\0" in text:
        raise ConfigError(f"--{name}={text!r} contains a byte of value 0, which no name can contain: remove it.")


def parse_profile_steps(text: str) -> tuple[int, int] | None:
    """(first, last) of --profile_steps; None if it is empty. Raises ConfigError."""
    if not text:
        return None
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise ConfigError(f"--profile_steps={text} must be FIRST:LAST with FIRST below LAST, for example 100:110.")
    return int(first), int(last)


def parse_args(flag: str, text: str) -> dict[str, Any]:
    """Reads `key=value,key=value` into {key: Python literal or string}; commas inside brackets or quotes do not split.

    Raises ConfigError if a piece has no `=`.
    """
    result: dict[str, Any] = {}
    for piece in _split_outside_brackets(text):
        key, equals, value = piece.partition("=")
        if not equals or not key.strip().isidentifier():
            raise ConfigError(
                f"--{flag}={text}: {piece.strip()!r} is not key=value; write for example size=tiny,dropout=0.1."
            )
        try:
            result[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            result[key.strip()] = value.strip()
    return result


def _split_outside_brackets(text: str) -> list[str]:
    pieces, depth, quote, current = [], 0, "", ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        if char == "," and depth == 0 and not quote:
            pieces.append(current)
            current = ""
        else:
            current += char
    return [piece for piece in [*pieces, current] if piece.strip()]
