"""The command line: precedence, flag files, messages, and the frozen flag surface."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfdist import flags
from tfdist.config import Config, iter_options
from tfdist.control.exit_codes import ConfigError

SURFACE = Path(__file__).with_name("flag_surface.txt")
FLAG_FILES = sorted(Path("flags").glob("*.flags"))


def test_flag_surface_is_frozen():
    """Adding, renaming or re-defaulting a flag is a decision: change flag_surface.txt with it."""
    surface = [f"{component}: {flags.format_flag(field.name, field.default)}" for component, field in iter_options()]
    assert surface == SURFACE.read_text().splitlines()


def test_command_line_wins_over_flag_file_wherever_it_stands(tmp_path):
    file = tmp_path / "a.flags"
    file.write_text("# comment\n--steps=10\n\n--noshuffle\n")
    for argv in (
        ["--steps=30", f"--flagfile={file}"],
        [f"--flagfile={file}", "--steps=30"],
        ["--flagfile", str(file), "--steps=30"],
    ):
        config = flags.parse(argv).config
        assert config.run.steps == 30 and not config.data.shuffle


def test_nested_flag_file_is_found_beside_the_one_that_names_it(tmp_path):
    (tmp_path / "base.flags").write_text("--steps=10\n--global_batch=8\n")
    (tmp_path / "child.flags").write_text("--flagfile=base.flags\n--steps=20\n")
    config = flags.parse([f"--flagfile={tmp_path / 'child.flags'}"]).config
    assert (config.run.steps, config.batch.global_batch) == (20, 8)


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--stesp=3"], ["--stesp", "steps"]),
        (["--steps=abc"], ["--steps=abc", "whole number"]),
        (["--learning_rate=fast"], ["--learning_rate=fast", "number"]),
        (["--shuffle=7"], ["--shuffle=7", "true or false"]),
        (["--steps"], ["--steps", "VALUE"]),
        (["train"], ["'train'", "--name=value"]),
        (["--flagfile=missing.flags"], ["missing.flags", "No such file"]),
        (["--flagfile"], ["--flagfile"]),
        (["--noshuffle=maybe"], ["--noshuffle=maybe", "switch"]),
        (["--data_dir=\udcff"], ["--data_dir=", "UTF-8"]),
        (["--batch_size=64"], ["--batch_size is not a flag of this command. Did you mean --global_batch (samples"]),
        (["--lr=0.1"], ["Did you mean --learning_rate?"]),
        (["--workers=2"], ["Did you mean `python -m tfdist.launch --workers=2 -- FLAGS`?"]),
        (["--step=3"], ["Did you mean: step_timeout, steps, steps_per_loop?"]),
    ],
)
def test_messages(argv, words):
    with pytest.raises(ConfigError) as error:
        flags.parse(argv)
    assert all(word in str(error.value) for word in words), error.value


def test_other_names_for_flags_are_no_flags_and_mean_flags():
    names = {field.name for _, field in iter_options()}
    for meant, others in flags.OTHER_NAMES.items():
        assert meant.partition(" ")[0].removeprefix("--") in names or not meant.startswith("--"), meant
        assert not names & set(others), others


def test_bad_flag_files(tmp_path):
    file = tmp_path / "x.flags"
    for text, words in [
        ("steps=3\n", "line 1"),
        ("--steps=3\n--\n", "line 2"),
        ("-\n", "line 1"),
        ("--bogus=1\n", "--bogus"),
        (f"--flagfile={file}\n", "includes itself"),
        ("--run_dir=runs/x # mine\n", "line 1.* its own line"),
        ('\n--run_dir="runs/x"\n', "line 2.* quotes"),
        ("--flagfile='other.flags'\n", "line 1.* quotes"),
    ]:
        file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            flags.parse([f"--flagfile={file}"])


def test_a_flag_file_without_an_end_is_refused_and_a_pipe_is_read(tmp_path):
    file = tmp_path / "x.flags"
    file.write_bytes(b"# " + b"x" * (2**20 - 3) + b"\n")
    assert flags.parse([f"--flagfile={file}", "--steps=3"]).config.run.steps == 3
    file.write_bytes(b"# " + b"x" * 2**20)
    for path in (str(file), "/dev/zero"):
        with pytest.raises(ConfigError, match=f"^--flagfile={path} is longer than 1048576 bytes: .* one per line.$"):
            flags.parse([f"--flagfile={path}"])
    reader, writer = os.pipe()
    os.write(writer, b"--steps=4\n--seed=5\n")
    os.close(writer)
    config = flags.parse([f"--flagfile=/dev/fd/{reader}"]).config  # as of the shell's <(...)
    os.close(reader)
    assert (config.run.steps, config.run.seed) == (4, 5)


def test_a_written_flag_file_holds_any_value(tmp_path):
    for value in ("runs/exp #3", "'quoted'"):
        config = Config().replace(run_dir=value, steps=7)
        flags.write_flagfile(config, tmp_path / "flags.txt", command="python -m tfdist.train")
        assert flags.parse([f"--flagfile={tmp_path / 'flags.txt'}"]).config == config


def test_a_flag_file_may_begin_with_a_mark_and_hold_json(tmp_path):
    file = tmp_path / "x.flags"
    file.write_text('--steps=3\n--source_args={"seed": 1, "name": "a#b"}\n', encoding="utf-8-sig")
    config = flags.parse([f"--flagfile={file}"]).config
    assert config.run.steps == 3
    assert config.data.source_args == '{"seed": 1, "name": "a#b"}'


def test_written_flag_file_reproduces_the_configuration(tmp_path):
    config = Config().replace(
        steps=7,
        global_batch=3,
        shuffle=False,
        learning_rate=1 / 3,
        model_args="widths=(8, 8),dropout=0.1",
        source_args="",
    )
    flags.write_flagfile(config, tmp_path / "flags.txt", command="python -m tfdist.train --steps=7")
    assert flags.parse([f"--flagfile={tmp_path / 'flags.txt'}"]).config == config


@pytest.mark.parametrize("file", FLAG_FILES, ids=lambda path: path.stem)
def test_shipped_flag_files_are_valid_and_have_a_header(file):
    flags.parse([f"--flagfile={file}"]).config.validate()
    header = file.read_text().split("--run_dir")[0]
    assert all(word in header for word in ("command:", "expected:")), header


@pytest.mark.parametrize("argv", [["--help"], ["--dry_run", "--flagfile=flags/digits_cnn.flags"], ["--steps=x"]])
def test_answers_that_need_no_tensorflow_do_not_import_it(argv):
    code = (
        "import sys; sys.argv[1:] = sys.argv[1:]; from tfdist import train\n"
        "try: train.main(sys.argv[1:])\n"
        "except (SystemExit, ValueError): pass\n"
        "heavy = [name for name in ('tensorflow', 'keras', 'numpy', 'sklearn') if name in sys.modules]\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    result = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "argument", ["--steps=a\nb", "--shuffle=a\nb", "--noshuffle=a\nb", "--stesp\nx=1", "--steps=\0"]
)
def test_a_line_break_in_what_is_refused_makes_no_second_line(argument):
    with pytest.raises(ConfigError) as error:
        flags.parse([argument])
    assert str(error.value).isprintable() and str(error.value).startswith(argument[:5]), error.value


def test_a_byte_of_a_flag_file_that_no_name_can_hold(tmp_path):
    (tmp_path / "a.flags").write_bytes(b"--backup_dir=a\0b\n--steps=1\n--global_batch=8\n")
    with pytest.raises(ConfigError, match=r"--backup_dir='a\\x00b' contains a byte of value 0"):
        flags.parse([f"--flagfile={tmp_path / 'a.flags'}"]).config.validate()
