"""Finds where in the user's own code an error arose: the last line of its traceback that does not belong to Python,
TensorFlow, Keras or tfdist."""

from __future__ import annotations

import re
import sysconfig
import textwrap
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_TFDIST, _STDLIB = re.escape(str(Path(__file__).parents[1])), re.escape(sysconfig.get_path("stdlib"))
_NOT_OWN = re.compile(rf"site-packages/(keras|tensorflow|numpy|optree)/|^<|^{_TFDIST}/|^{_STDLIB}/(?!site-packages)")

# AutoGraph converts the user's code into a temporary file, which is gone later, with functions that it names itself.
_GENERATED = re.compile(r"/__autograph_generated_file\w*\.py$")
_LAMBDA = "None"  # AutoGraph's name for a lambda
_GENERATED_PART = re.compile(rf"(if|else|loop)_body(_\d+)?$|loop_test(_\d+)?$|{_LAMBDA}$|<")

_INSTALLED = re.compile(rf"/(site|dist)-packages/|^<|^{_TFDIST}/|^{_STDLIB}/")


class _Place(NamedTuple):
    """A line of a traceback."""

    file: str
    line: int
    function: str


def failure(error: BaseException) -> str:
    """ "failed at FILE:LINE, in FUNCTION: what": the user's own line in which an error arose, and the error's text."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [_Place(frame.filename, frame.lineno or 0, frame.name) for frame in frames]
    return _failure(places, f"{type(error).__name__}: {said(error)}".removesuffix(": "))


def failure_of_own(error: BaseException) -> str:
    """Returns the text of `failure`; "" if the error comes from installed packages, not from the user's program, or if
    it is a request to end (such as SystemExit)."""
    frames = traceback.extract_tb(error.__traceback__)
    is_asked_for = not isinstance(error, Exception)
    if is_asked_for or not any(frame.line and not _INSTALLED.search(frame.filename) for frame in frames):
        return ""
    return failure(error)


def said(error: BaseException) -> str:
    """Returns the text of an error; "" if its own code for that fails."""
    try:
        return str(error)
    except Exception:  # whatever the user's __str__ raises
        return ""


def first_line(error: BaseException) -> str:
    """Returns the first line of the text of an error; "" if there is none."""
    return next(iter(said(error).strip().splitlines()), "")


def first_paragraph(error: BaseException) -> str:
    """Returns the first paragraph of an error's text as one line: Keras breaks its sentences into lines."""
    return " ".join(said(error).strip().partition("\n\n")[0].split())


def failure_in_text(text: str) -> str:
    """Returns a sentence like `failure` for an error that TensorFlow reports as text with a traceback in it; "" if that
    contains neither a line of the user's own code nor one that AutoGraph has made from it."""
    text = text.partition("Traceback (most recent call last)")[2]
    places = _places_in(text)
    return _failure(places, what_in_text(text)) if _own(places) or _generated(places) else ""


_PLACE_LINE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_REWRITTEN = "in user code:"  # prefix of AutoGraph's message about an error in a function that it has converted


def _places_in(text: str) -> list[_Place]:
    return [_Place(file, int(line), function) for file, line, function in _PLACE_LINE.findall(text)]


def _failure(places: Sequence[_Place], what: str) -> str:
    if _REWRITTEN in what:
        places, what = _places_in(what), what_in_text(what)
    return f"failed{_at(places)}: {textwrap.shorten(without_internals(what), 600)}"


def _at(places: Sequence[_Place]) -> str:
    """ " at FILE:LINE, in FUNCTION", or the part of it that is known."""
    if own_places := _own(places):
        last = own_places[-1]
        return f" at {last.file}:{last.line}" + (f", in {last.function}" if last.function != _LAMBDA else "")
    named = [place.function for place in _generated(places) if not _GENERATED_PART.match(place.function)]
    return f" in {named[-1].removeprefix('tf__')}" if named else ""


# Internals that TensorFlow and Keras add to error texts: names of their operations, iterators and objects, advice for
# authors of graph code, lists of arguments, colors.
_INTERNALS = re.compile(
    r" for '\{\{node [^']*'(?: \(op: '\w+'\))?|\{\{[^}]*\}\}|\[\[.*?\]\]|\[Op:\w+\]( name\b:? *)?|\x1b\[[0-9;]*m"
    r"|(?:Error in user-defined function passed to \S+ transformation with iterator: )?\bIterator::Root\S*: "
    r"|Arguments received by .*| You can attempt the following resolutions.*| at 0x[0-9a-f]{6,}",
    re.DOTALL,
)


def without_internals(text: str) -> str:
    """Removes the internals of TensorFlow and Keras from the text of an error."""
    return re.sub(r" +", " ", _INTERNALS.sub("", text)).strip()


_NODE = re.compile(r"\{\{node (gradient_tape/)?([^\s}]+)\}\}")
_COMPILED = re.compile(r"\bcompile_(loss|metric)s?/([^/]+)/")


def part_at_fault(text: str) -> str:
    """ " in the loss NAME", " in the metric NAME" or " in MODEL/LAYER": the part of a Keras model whose operation
    TensorFlow names in the text of its error; "" if it names none."""
    if not (node := _NODE.search(text)):
        return ""
    if compiled := _COMPILED.search(node[2]):
        return f" in the {compiled[1]} {compiled[2]}"
    layers = node[2].split("/")[: -2 if node[1] else -1]  # in a gradient, the last two parts are the operation
    return f" in {'/'.join(layers)}" if layers else ""


def _own(places: Sequence[_Place]) -> list[_Place]:
    return [place for place in places if not (_NOT_OWN.search(place.file) or _GENERATED.search(place.file))]


def _generated(places: Sequence[_Place]) -> list[_Place]:
    return [place for place in places if _GENERATED.search(place.file)]


def what_in_text(text: str) -> str:
    """Returns the last "SomeError: words" at the beginning of a line of a text; the whole text if there is none."""
    kinds = r"Error|Exception|Interrupt|Iteration|Exit|Timeout|Disconnected|IncompleteRead"
    found = re.findall(rf"^\s*([\w.]*(?:{kinds}): .*)$", text, re.MULTILINE)
    return found[-1].strip() if found else text
