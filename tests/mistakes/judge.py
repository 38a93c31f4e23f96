"""Checks whether a mistake ended as it must: with the right code, one sentence that names what was wrong, and nothing
from inside TensorFlow.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.mistakes.mistake import Mistake
from tests.mistakes.runner import Outcome
from tfdist.control.exit_codes import ExitCode

_SENTENCE = re.compile(r"^(?:\[\w+ \d+\] )?tfdist: error: (.*) \(exit code (\d+), ([A-Z_]+)\)$", re.MULTILINE)
_INSIDE = re.compile(
    r"\{\{|\[\[\{|\[Op:|Traceback|site-packages|tensorflow/(?:python|core)|keras/src|node \w+/|Arguments received"
    r" by|0x[0-9a-f]{6,}"
)
_TERMINAL = re.compile(r"\x1b(?!\[[0-9;]*m)|[\x00-\x08\x0b\x0c\x0e-\x1a\x7f\x9b\u202e]")
_MOST_CHARACTERS = 1300
_NO_LAYOUT = "   does not fit, because even "


def sentence(outcome: Outcome) -> str:
    """Returns the last error message of tfdist; "" if there is none."""
    told = _SENTENCE.findall(outcome.output)
    return told[-1][0] if told else ""


def problems(mistake: Mistake, outcomes: Sequence[Outcome]) -> list[str]:
    """Returns what is wrong with the way a case ended; [] if nothing is."""
    found = []
    for index, outcome in enumerate(outcomes):
        found += [f"process {index}: {problem}" for problem in _of_one(mistake, outcome)]
    codes = [outcome.code for outcome in outcomes]
    if not found and not any(code in mistake.codes for code in codes):
        found.append(f"ended with {codes}, expected one of {sorted(map(int, mistake.codes))}")
    if (
        mistake.surely_wrong
        and not found
        and any(mistake.words)
        and not any(
            word in sentence(outcome) for outcome in outcomes if outcome.code in mistake.codes for word in mistake.words
        )
    ):
        found.append(
            f"the sentence names none of {', '.join(mistake.words)}: {[sentence(outcome) for outcome in outcomes]}"
        )
    return found


def _of_one(mistake: Mistake, outcome: Outcome) -> list[str]:
    if outcome.code is None:
        return ["hangs"]
    found = []
    if outcome.code not in set(ExitCode):
        found.append(f"exit code {outcome.code} is not documented")
    if outcome.code == ExitCode.INTERNAL and ExitCode.INTERNAL not in mistake.codes:
        found.append("exit code 1, an unexpected error")
    if "Traceback" in outcome.output and ExitCode.INTERNAL not in mistake.codes:
        found.append("a traceback")
    told = _SENTENCE.findall(outcome.output)
    answered = _NO_LAYOUT in outcome.output  # by a plan, whose exit code says so, too
    if outcome.code not in (0, 1, 130, 42, None) and not (
        answered or any(int(code) == outcome.code for _, code, _ in told)
    ):
        found.append("no sentence with the exit code")
    if len({text for text, _, _ in told}) > (2 if mistake.processes[0].arguments[0] == "launch" else 1):
        found.append("several sentences")
    for text, _, _ in told:
        if inside := _INSIDE.search(text):
            found.append(f"the sentence has {inside.group()!r}")
        if len(text) > _MOST_CHARACTERS:
            found.append(f"the sentence has {len(text)} characters")
        if re.search(r"\b(\w+) \1\b", text) and "the the" in text:
            found.append("a word twice")
    if control := _TERMINAL.search(outcome.output):
        found.append(f"the terminal gets {control.group()!r}")
    if outcome.code and "tfdist: error: " in outcome.output and not told:
        found.append("the sentence has several lines")
    return found


def problems_of_script(outcomes: Sequence[Outcome], alone: Sequence[Outcome]) -> list[str]:
    """The same for a Keras script. alone: the same script in one process, which shows what plain Keras does."""
    (plain,) = alone
    found = []
    for index, outcome in enumerate(outcomes):
        if outcome.code is None:
            found.append(f"process {index}: hangs")
        elif (
            outcome.code == ExitCode.INTERNAL and plain.code != ExitCode.INTERNAL and _kind(outcome) != "of the script"
        ):
            found.append(f"process {index}: exit code 1, which one process alone ends with {plain.code}")
        elif outcome.code == ExitCode.INTERNAL and plain.code == ExitCode.INTERNAL and _kind(outcome) != _kind(plain):
            found.append(f"process {index}: {_kind(outcome)} instead of {_kind(plain)}")
        elif outcome.code not in set(ExitCode) and outcome.code not in (plain.code, 7):
            found.append(f"process {index}: exit code {outcome.code} is not documented")
        elif outcome.code not in (0, 1, 130, 3, 7, plain.code) and not sentence(outcome):
            found.append(f"process {index}: no sentence with the exit code")
        for text, _, _ in _SENTENCE.findall(outcome.output):
            if (inside := _INSIDE.search(text)) and outcome.code != ExitCode.INTERNAL:
                found.append(f"process {index}: the sentence has {inside.group()!r}")
            if len(text) > _MOST_CHARACTERS and outcome.code != ExitCode.INTERNAL:
                found.append(f"process {index}: the sentence has {len(text)} characters")
    if plain.code not in (0, None) and outcomes and all(outcome.code == 0 for outcome in outcomes):
        found.append(f"all ended with 0, one process alone with {plain.code}")
    return found


def _kind(outcome: Outcome) -> str:
    """Returns the kind of the error that ended a script. "of the script": raised on purpose, on one worker."""
    told = re.findall(r"^tfdist: error: unexpected (\w+)", outcome.output, re.MULTILINE)
    if not told:
        return "no error"
    return "of the script" if re.search(r"of one worker|ZeroDivisionError|not_yet\.keras", outcome.output) else told[-1]
