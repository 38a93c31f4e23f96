"""Where in the user's own code an error arose: the last of its lines that is neither Python's, TensorFlow's, Keras' nor
tfdist's.
"""

from __future__ import annotations

import re
import sysconfig
import textwrap
import traceback
from collections.abc import Sequence
from pathlib import Path

_NOT_OWN = re.compile(
    rf"site-packages/(keras|tensorflow|numpy)/|^<|^{re.escape(str(Path(__file__).parents[1]))}/|^{re.escape(sysconfig.get_path('stdlib'))}/(?!site-packages)"
)


def failure(error: BaseException) -> str:
    """ "failed at FILE:LINE, in FUNCTION: what": the user's own line in which an error arose, and what it says."""
    places = [(frame.filename, frame.lineno, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    return _failure(places, f"{type(error).__name__}: {error}")


def failure_told(text: str) -> str:
    """The same of an error that TensorFlow tells as text with a traceback in it; "" if it has no line of the user's
    own.
    """
    text = text.partition("Traceback (most recent call last)")[2]
    places = [(file, int(line), name) for file, line, name in _PLACE.findall(text)]
    return _failure(places, _what(text)) if _own(places) else ""


_PLACE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_REWRITTEN = "in user code:"  # so begins what AutoGraph says of a function that it has rewritten


def _failure(places: Sequence[tuple[str, int, str]], what: str) -> str:
    if _REWRITTEN in what:
        places = [(file, int(line), name) for file, line, name in _PLACE.findall(what)]
        what = _what(what)
    own = _own(places)
    at = f" at {own[-1][0]}:{own[-1][1]}, in {own[-1][2]}" if own else ""
    return f"failed{at}: {textwrap.shorten(what, 600)}"


def _own(places: Sequence[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
    return [place for place in places if not _NOT_OWN.search(place[0])]


def _what(text: str) -> str:
    """The last "SomeError: words" of a text that begins a line."""
    found = re.findall(r"^\s*([\w.]*(?:Error|Exception|Interrupt|Iteration): .*)$", text, re.MULTILINE)
    return found[-1].strip() if found else text
