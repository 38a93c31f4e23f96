"""Sections are named in one place, and each has its limit."""

import ast
from pathlib import Path

import pytest

from tfdist.config import ClusterConfig
from tfdist.control import sections
from tfdist.run import health

NAMES = {value for name, value in vars(sections).items() if name.isupper() and isinstance(value, str)}


def named_in_place(tree):
    """Lines that enter a section whose name stands there as text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("section", "enter"):
            texts = [part for each in node.args for part in ast.walk(each) if isinstance(part, ast.Constant)]
            if any(isinstance(text.value, str) for text in texts):
                yield f"{node.lineno}: {ast.unparse(node)}"


def test_a_section_is_named_by_its_constant():
    """A wrong text would fail nowhere: the section would have no limit, and nobody would trace it."""
    wrong = [
        f"{path}:{line}"
        for path in sorted(Path("tfdist").rglob("*.py"))
        for line in named_in_place(ast.parse(path.read_text()))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("line", ["hooks.section('sav')", "dog.enter('a' if first else STEP)"])
def test_the_rule_about_names_finds_what_it_should(line):
    assert list(named_in_place(ast.parse(line)))


def test_each_section_has_a_limit_and_its_flag():
    options = ClusterConfig(
        startup_timeout=1.0, save_timeout=2.0, first_step_timeout=3.0, step_timeout=5.0, eval_timeout=6.0
    )
    assert health.section_limits(options) == {
        "start-up": 4.0,
        "restore": 2.0,
        "first step": 3.0,
        "step": 5.0,
        "between steps": 5.0,
        "evaluation": 6.0,
        "save": 2.0,
    }
    assert set(health.section_limits(options)) == NAMES - {sections.STOPPING}  # its limit is --grace_period
    assert {section: limit.flag for section, limit in health._LIMITS.items()} == {
        "start-up": "4 x --startup_timeout",
        "restore": "--save_timeout",
        "first step": "--first_step_timeout",
        "step": "--step_timeout",
        "between steps": "--step_timeout",
        "evaluation": "--eval_timeout",
        "save": "--save_timeout",
    }
