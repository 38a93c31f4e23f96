"""`python -m tfdist.script`: a program of the user's own ends with tfdist's exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfdist.control.command_parser import program_command
from tfdist.control.exit_codes import ConfigError, ExitCode

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
{imported}
from tfdist.control.exit_codes import PeerLostError

print(__name__, words.FOUND, *sys.argv[1:])
raise PeerLostError("worker 1 is gone.")
"""


def run(folder, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "tfdist.script", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def project(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "words.py").write_text("FOUND = 'found'\n")
    (tmp_path / "mine" / "train.py").write_text(PROGRAM.format(imported="from . import words"))
    (tmp_path / "mine" / "script.py").write_text(PROGRAM.format(imported="import words"))
    return tmp_path


@pytest.mark.parametrize("program", [["-m", "mine.train"], ["mine/script.py"]])
def test_a_program_has_its_arguments_and_the_exit_codes(project, program):
    ended = run(project, *program, "--epochs=3", "-m")
    assert (ended.returncode, ended.stdout) == (ExitCode.PEER_LOST, "__main__ found --epochs=3 -m\n"), ended.stderr
    assert "worker 1 is gone." in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_package_does_not_see_the_token(project):
    (project / "mine" / "__init__.py").write_text("import os\nprint(os.environ.get('TFDIST_JOB_TOKEN'))\n")
    token = {"TFDIST_JOB_TOKEN": "a" * 64}
    assert run(project, "-m", "mine.train", **token).stdout.startswith("None\n__main__ found")


@pytest.mark.parametrize(
    "program, sentence",
    [
        (["-m", "mine.gone"], "-m mine.gone: there is no such module"),
        (["-m"], "-m needs a module name"),
        (["gone.py"], "gone.py does not exist"),
        ([], "No script is given"),
    ],
)
def test_what_is_no_program(project, program, sentence):
    ended = run(project, *program)
    assert ended.returncode == ExitCode.CONFIG
    assert sentence in ended.stderr


def test_only_commands_of_tfdist_know_the_codes_themselves():
    assert program_command(["-m", "tfdist.doctor", "--run_dir=a"]) == ["tfdist.doctor", "--run_dir=a"]
    assert program_command(["-m", "tfdist_mine", "x"]) == ["tfdist.script", "-m", "tfdist_mine", "x"]
    assert program_command(["train.py", "-m"]) == ["tfdist.script", "train.py", "-m"]
    with pytest.raises(ConfigError, match="module name after it"):
        program_command(["-m", "--epochs=3"])
