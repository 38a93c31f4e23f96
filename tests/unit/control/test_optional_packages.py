"""What a package that is not installed leaves undone: one sentence, and the exit code of what is not supported."""

import sys
from pathlib import Path

import pytest

from tfdist import comm, plan
from tfdist.communication import present
from tfdist.config import Config
from tfdist.control.exit_codes import ExitCode, UnsupportedError
from tfdist.data.sources import digits
from tfdist.telemetry import plot

SENTENCE = "needs the Python package matplotlib, which is not installed: pip install matplotlib"


@pytest.fixture
def without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_pictures_without_matplotlib(without_matplotlib, tmp_path):
    assert UnsupportedError.exit_code == ExitCode.UNSUPPORTED
    with pytest.raises(UnsupportedError, match=f"^--plot {SENTENCE}$"):
        plan.main([f"--plot={tmp_path / 'a.png'}", "--", "--flagfile=flags/gpt2_124m.flags"])
    assert (
        plot.draw_curves(tmp_path / "log", tmp_path / "a.png", reference=None)
        == f"no picture: --plot {SENTENCE}, or use --noplot"
    )
    assert comm.drawn(present.draw_models, tmp_path / "a.png", []) == f"no picture: a picture {SENTENCE}"
    assert not list(tmp_path.iterdir())


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setattr(digits, "find_spec", lambda _: None)
    with pytest.raises(UnsupportedError, match="^--source=digits needs scikit-learn: run `pip install scikit-learn`"):
        digits.load(Config().data, "train")


def test_the_requirements_of_the_scripts_are_those_of_the_package_with_two_extras():
    import tomllib

    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    listed = [line for line in Path("requirements.txt").read_text().splitlines() if line and line[0] != "#"]
    assert sorted(listed) == sorted([*project["dependencies"], *extras["digits"], *extras["plots"]])
