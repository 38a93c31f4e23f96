"""Mistakes drawn at random end with the right exit code and one sentence; see scripts/mistakes.py for many more."""

from __future__ import annotations

import pytest

from tests.mistakes.command import main
from tests.mistakes.judge import problems
from tests.mistakes.mistake import CONFIG, one
from tests.mistakes.mutations import FAMILIES, draw
from tests.mistakes.runner import Outcome


@pytest.mark.slow
def test_fifty_mistakes(capsys):
    """As scripts/mistakes.py --fixed."""
    code = main(["--fixed"])
    assert code == 0, capsys.readouterr().out[-8000:]


def test_a_seed_draws_the_same_mistakes_of_all_families():
    drawn = [draw(3, number) for number in range(600)]
    assert drawn == [draw(3, number) for number in range(600)]
    assert len({mistake.kind for mistake in drawn}) > 2 * len(FAMILIES)


@pytest.mark.parametrize(
    ("code", "output", "problem"),
    [
        (2, "tfdist: error: --steps=x is not a whole number. (exit code 2, CONFIG)\n", ""),
        (0, "checkpoints run/checkpoints\n", "ended with [0]"),
        (
            1,
            "Traceback (most recent call last):\ntfdist: error: unexpected E:  (exit code 1, INTERNAL)\n",
            "exit code 1",
        ),
        (None, "", "hangs"),
        (-11, "", "not documented"),
        (4, "tfdist: error: --steps=x is no data. (exit code 4, DATA)\n", "ended with [4]"),
        (2, "tfdist: error: something is wrong. (exit code 2, CONFIG)\n", "names none of --steps"),
        (2, "tfdist: error: --steps=x\nis wrong. (exit code 2, CONFIG)\n", "no sentence"),
        (2, "tfdist: error: --steps at {{node x}}. (exit code 2, CONFIG)\n", "has '{{'"),
        (2, "\x1b[2J\ntfdist: error: --steps=x is wrong. (exit code 2, CONFIG)\n", "the terminal gets"),
    ],
)
def test_the_judge(code, output, problem):
    found = problems(one("train", ["train", "--steps=x"], CONFIG, "--steps"), [Outcome(code, output, 0.0, 0.0)])
    assert (problem in found[0]) if problem else found == []
