"""The command `tfdist`: its commands are the modules, its help answers at once, its completions are the flags."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tfdist
from tfdist import completion, flags, train
from tfdist.__main__ import COMMANDS, MODULES
from tfdist.config import is_switch, iter_options
from tfdist.control.exit_codes import ConfigError, ExitCode


def run(*arguments, command=("-m", "tfdist"), **options):
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    return subprocess.run(
        [sys.executable, *command, *arguments], capture_output=True, text=True, env=environment, **options
    )


def test_each_command_is_a_module():
    for name in COMMANDS:
        text = Path("tfdist", f"{MODULES.get(name, name)}.py").read_text()
        assert text.startswith('"""python -m tfdist.') and 'if __name__ == "__main__":' in text, name
    commands = {path.stem for path in Path("tfdist").glob("*.py") if "exit_codes.run_command(main" in path.read_text()}
    assert set(COMMANDS) == commands | set(MODULES)


def test_help_and_version_answer_without_tensorflow():
    shown = run("--help", command=("-X", "importtime", "-m", "tfdist"))
    assert shown.returncode == 0 and all(f"\n  {name} " in shown.stdout for name in COMMANDS)
    assert not re.search(r"\| +(tensorflow|keras|numpy|absl)\b", shown.stderr)
    assert run("--version").stdout == f"tfdist {tfdist.__version__}\n" == run("train", "--version").stdout


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["trian"], "did you mean train?"),
        (["frobnicate"], "`tfdist --help` lists them"),
        (["--workers=2"], "write tfdist COMMAND --workers=2"),
        ([], "No command is given"),
    ],
)
def test_what_is_no_command(arguments, words):
    ended = run(*arguments)
    assert ended.returncode == ExitCode.CONFIG and words in ended.stderr and ended.stderr.count("\n") == 1
    assert bool(ended.stdout) == (not arguments)  # the list of commands


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["launch", "--worker=2"], "--worker is not a flag of python -m tfdist.launch: did you mean --workers?"),
        (["launch", "--max-restarts", "2"], "did you mean --max_restarts?"),
        (["plan", "--device=2"], "did you mean --devices?"),
        (["launch", "--", "--workers=2"], "--workers is a flag of python -m tfdist.launch: put it before `--`."),
        (["plan", "--", "--devices=2"], "--devices is a flag of python -m tfdist.plan: put it before `--`."),
        (["jobs", "slurm", "--", "--setup=a"], "--setup is a flag of python -m tfdist.jobs slurm: put it before `--`."),
        (["jobs", "slurm", "--", "-m"], "-m needs a module name after it"),
        (["jobs", "slurm", "--", "-m", "tfdist.train", "--stepz=3"], "--stepz is not a flag of this command."),
        (["launch", "--", "--setup=a"], "--setup is not a flag of this command."),
        (["launch", "--steps=2"], "unrecognized arguments: --steps=2: the launcher's own flags go before `--`"),
    ],
)
def test_a_flag_that_is_spelt_almost_like_one_is_told_it(arguments, words):
    ended = run(*arguments)
    assert ended.returncode == ExitCode.CONFIG and words in ended.stderr and ended.stderr.count("\n") == 1, ended.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["plan", "--devices=2", "--", "--flagfile=flags/digits_cnn.flags"], 0),
        (["plan", "--hardware=h100,memory_gb=0.1", "--", "--flagfile=flags/gpt2_124m.flags"], 2),
        (["train", "--helpfull"], 0),
    ],
)
def test_a_closed_pipe_is_no_error(arguments, code, unbuffered):
    """As `| head` does it: nobody reads what the command prints."""
    read, write = os.pipe()
    os.close(read)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "tfdist", *arguments],
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path.cwd()), "PYTHONUNBUFFERED": unbuffered},
        )
    finally:
        os.close(write)
    assert (ended.returncode, ended.stderr) == (code, "")


def bare_python(folder, *packages):
    """Runs commands in a Python that has none but these packages."""
    for name in packages:
        where = Path(importlib.util.find_spec(name).origin).parent
        for path in (where, where.with_name(f"{name}.libs")):
            if path.exists():
                (folder / path.name).symlink_to(path)
    environment = {**os.environ, "PYTHONPATH": f"{Path.cwd()}{os.pathsep}{folder}"}

    def command(*arguments):
        python = [getattr(sys, "_base_executable", sys.executable), "-S", "-m", "tfdist"]
        return subprocess.run([*python, *arguments], capture_output=True, text=True, env=environment)

    return command


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"fit", "script", "report"}))
def test_a_python_without_the_packages_is_told_so(name, tmp_path):
    ended = bare_python(tmp_path)(name, *(["bash"] if name == "completion" else []))
    assert ended.returncode == ExitCode.UNSUPPORTED and ended.stderr.count("\n") == 1, ended.stderr
    assert re.search(
        r"has no package absl, which tfdist needs: .*`pip install .*\(exit code 10, UNSUPPORTED\)", ended.stderr
    )


def test_without_tensorflow_the_planner_plans_and_training_says_what_is_missing(tmp_path):
    command = bare_python(tmp_path, "absl", "numpy")
    planned = command("plan", "--", "--flagfile=flags/gpt2_124m.flags")
    assert planned.returncode == 0 and "model: transformer" in planned.stdout, planned.stderr
    trained = command("train", "--flagfile=flags/digits_cnn.flags", f"--run_dir={tmp_path / 'run'}")
    assert trained.returncode == ExitCode.UNSUPPORTED and trained.stderr.count("\n") == 1, trained.stderr
    assert "tensorflow is not installed: pip install 'tensorflow~=2.21.0'" in trained.stderr


def test_a_command_is_the_same_as_its_module(tmp_path):
    """Modules in the working directory count for both; words in messages are the same."""
    (tmp_path / "mine.py").write_text("raise ImportError('mine was imported')\n")
    dry_run = ["--dry_run", "--source=mine:data", "--steps=1", "--global_batch=8"]
    for arguments in (dry_run, [*dry_run, "--stesp=3"]):
        one = run("train", *arguments, cwd=tmp_path)
        other = run(*arguments, command=("-m", "tfdist.train"), cwd=tmp_path)
        assert (one.returncode, one.stdout, one.stderr) == (other.returncode, other.stdout, other.stderr)
    script = tmp_path / "script.py"
    script.write_text("import sys, mine_too\nprint(sys.argv, sys.path[0], __name__)\n")
    (tmp_path / "mine_too.py").touch()
    found = run("fit", "script.py", "--a=b", cwd=tmp_path)
    assert found.stdout == f"{['script.py', '--a=b']} {tmp_path} __main__\n", found.stderr


def test_a_console_script_has_the_working_directory_first_on_its_path(tmp_path):
    """As `python -m` has, where Python puts the folder of the script."""
    console = tmp_path / "bin" / "tfdist"
    console.parent.mkdir()
    console.write_text(
        "import runpy, sys\nfrom tfdist.__main__ import main\n"
        "runpy.run_module = lambda name, **_: print(name, sys.path[0], sys.argv[1:])\nmain()\n"
    )
    shown = run("train", "--steps=1", command=(str(console),), cwd=tmp_path)
    assert shown.stdout == f"tfdist.train {tmp_path} ['--steps=1']\n", shown.stderr


@pytest.mark.parametrize("index", [0, 1, 2])
def test_every_worker_tells_that_ports_do_not_suffice(index, monkeypatch):
    cluster = {"worker": ["a:1", "b:1", "b:2"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}}))
    words = "--prometheus_port=65535 leaves no port for local rank 1, .*65536: choose one of at most 65534"
    with pytest.raises(ConfigError, match=words):
        train.main(["--steps=1", "--global_batch=8", "--prometheus_port=65535"])


def test_help_shows_twenty_flags_and_helpfull_all():
    names = [field.name for _, field in iter_options()]
    for command, own in (("train", ()), ("launch", ("--workers", "--max_restarts"))):
        short, full = run(command, "--help"), run(command, "--helpfull")
        assert short.returncode == full.returncode == 0 and "--helpfull shows all" in short.stdout
        shown = re.findall(r"^  --(?:no)?(\w+)(?==|$)", short.stdout, re.MULTILINE)
        assert len([name for name in shown if name in names]) == 20 and all(flag in short.stdout for flag in own)
        assert all(re.search(rf"^  --(no|\[no\])?{name}\b", full.stdout, re.MULTILINE) for name in names)
        assert all(flag in full.stdout for flag in own)


# -- completion


def complete(script, line):
    """What bash would offer at the end of a line."""
    asked = f'{script}\nCOMP_LINE=$1 COMP_POINT=${{#1}}; _tfdist 2>/dev/null; printf "%s\\n" "${{COMPREPLY[@]}}"'
    ended = subprocess.run(["bash", "-c", asked, "bash", line], capture_output=True, text=True, check=True)
    return ended.stdout.split()


def test_bash_completes_commands_flags_and_values():
    script = completion.script("bash")
    assert complete(script, "tfdist ") == list(COMMANDS) and complete(script, "tfdist ev") == ["evaluate"]
    every = complete(script, "tfdist train --")
    for _, field in iter_options():
        name = f"--{field.name}"
        assert {name, f"--no{field.name}"} <= set(every) if is_switch(field) else f"{name}=" in every
    for line, offered in {
        "tfdist train --precision=": ["float32", "bfloat16", "float16"],
        "tfdist train --strategy=mi": ["mirrored"],
        "tfdist evaluate --at": ["--at_step="],
        "tfdist launch --wor": ["--workers="],
        "tfdist launch --workers=2 -- --global": ["--global_batch="],
        "tfdist launch --workers=2 -- --zero=1 --wor": ["--workers_per_host="],
        "tfdist launch --pin=": ["auto", "none"],
        "tfdist jobs sl": ["slurm"],
        "tfdist jobs slurm --no": ["--nodes="],
        "tfdist jobs slurm --nodes=2 -- --schedule=c": ["constant", "cosine"],
        "tfdist report --t": ["--text"],
        "tfdist comm --repe": ["--repeats="],
        "tfdist completion z": ["zsh"],
        "tfdist train --run_dir=": [],  # files
    }.items():
        assert complete(script, line) == offered, line


@pytest.mark.parametrize("shell", list(completion.SHELLS))
def test_completion_scripts_can_be_read_by_their_shell(shell):
    printed = run("completion", shell).stdout
    assert printed == completion.script(shell) and not re.search(r"<\w+>", printed)
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=printed, text=True).returncode == 0


def test_a_shell_without_completion_is_a_mistake():
    ended = run("completion", "tcsh")
    assert ended.returncode == ExitCode.CONFIG and "bash|zsh|fish" in ended.stderr
    assert flags.asked_help(["-h"]) == "key"


@pytest.mark.parametrize("code", [0, None, 3])
def test_code_of_the_users_that_ends_the_program_is_no_end_of_the_run(code, monkeypatch):
    """A layer's `sys.exit(0)` would else be a run that has done all its steps."""

    def exits(*_):
        sys.exit(code)

    monkeypatch.setattr(train, "check_given", exits)
    with pytest.raises(ConfigError, match=rf"ended the program before the run was over \(sys.exit\({code}\)\)"):
        train.main(["--source=digits", "--model=mlp", "--steps=1", "--global_batch=8"])
