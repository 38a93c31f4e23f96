"""What is said when the user's own code fails."""

import subprocess
import sys
from pathlib import Path

import pytest

from tfdist.control.exit_codes import ConfigError, DataError
from tfdist.plugins import check_switches, check_takes, own_code, resolve


def test_it_is_said_where_in_the_own_code():
    with (
        pytest.raises(
            ConfigError,
            match=(
                r"^--source=mine:data failed at .*test_plugins\.py:\d+, in test_it_is_said_where_in_the_own_code:"
                r" KeyError: 'label'$"
            ),
        ),
        own_code("source", "mine:data"),
    ):
        {}["label"]


def test_not_where_in_keras():
    import keras

    keras.config.disable_traceback_filtering()
    try:
        with (
            pytest.raises(ConfigError, match=r"failed at .*test_plugins\.py:\d+, in test_not_where_in_keras: "),
            own_code("model", "mine:model"),
        ):
            keras.layers.Dense(-1)
    finally:
        keras.config.enable_traceback_filtering()


def test_a_module_that_fails_at_its_import(tmp_path, monkeypatch):
    (tmp_path / "broken_at_import.py").write_text("import json\nimport not_installed_anywhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ConfigError,
        match=(
            r"--model=broken_at_import:model failed at .*broken_at_import\.py:2, in <module>: ModuleNotFoundError: No"
            r" module named 'not_installed_anywhere'"
        ),
    ):
        resolve("model", "broken_at_import:model", {})


def test_other_errors_stay_what_they_are():
    class ResourceExhaustedError(Exception):
        pass

    for error in (ConfigError("as it is"), MemoryError(), ResourceExhaustedError()):
        with pytest.raises(type(error)) as raised, own_code("model", "mine:model"):
            raise error
        assert raised.value is error


def test_a_file_is_taken_by_its_path(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "by_its_path.py").write_text(
        "import os.path\nfrom json import dumps\n\nX = 3\ndef model(): return X\ndef _rows(): pass\nclass Data: pass\n"
    )
    (tmp_path / "json.py").write_text("def model(): return 3\n")
    assert resolve("model", f"{tmp_path}/by_its_path.py:model", {})() == 3
    monkeypatch.chdir(tmp_path)
    assert resolve("model", "./by_its_path.py:model", {})() == resolve("model", "by_its_path.py:model", {})() == 3
    for name, words in (
        ("./other.py:model", r"--model=./other.py:model: there is no Python file ./other.py"),
        ("./by_its_path:model", "there is no Python file"),
        ("./json.py:model", "another module 'json'"),
        ("./by_its_path.py:other", "the module by_its_path has no function 'other'; it has model, Data[.]$"),
    ):
        with pytest.raises(ConfigError, match=words):
            resolve("model", name, {})


def test_a_function_of_other_arguments():
    check_takes("augment", "mine:f", lambda x, y, seeds, strength=1: x, ("x", "y", "seeds"), "")
    check_takes("augment", "mine:f", lambda *args: args, ("x", "y", "seeds"), "")
    with pytest.raises(ConfigError, match=r"^--augment=mine:f takes \(x, y\): as it should be\.$"):
        check_takes("augment", "mine:f", lambda x, y: x, ("x", "y", "seeds"), "as it should be")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model=resnet5000"], "--model=resnet5000 is unknown: use mlp"),
        (["--source=digit"], "--source=digit is unknown: use digits"),
        (["--model=no_such_module:model"], "no module 'no_such_module'"),
        (["--source=./no/such/file.py:data"], "no Python file ./no/such/file.py"),
        (["--model=cnn", "--global_batch=0"], "The batch size is not given"),
    ],
)
def test_it_is_told_before_tensorflow_is_imported(flags, words):
    """Each import of it would take seconds."""
    program = (
        "import sys; from tfdist import train\ntry: train.main(sys.argv[1:])\nexcept ValueError as error: print(error,"
        " 'tensorflow' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--steps=5", "--global_batch=24", *flags],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert words in done.stdout and done.stdout.strip().endswith("False"), done.stdout + done.stderr


class Unspeakable(Exception):
    def __str__(self):
        raise KeyError


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (SystemExit(0), r"^--model=mine:model ended the program \(sys\.exit\(0\)\)"),
        (SystemExit("bye"), r"sys\.exit\('bye'\)"),
        (Unspeakable(), r"in test_what_ends_the_own_code: Unspeakable$"),
        (
            ValueError(
                "\x1b[1mtotal size for '{{node Reshape}} = Reshape[T=DT_FLOAT](x)' {{node a}} here Arguments received"
                " by f"
            ),
            r"ValueError: total size here$",
        ),
    ],
)
def test_what_ends_the_own_code(error, words):
    with pytest.raises(ConfigError, match=words), own_code("model", "mine:model"):
        raise error


def test_a_file_that_a_source_lacks_is_missing_data():
    """By its exit code a supervisor knows that the configuration is right."""
    with (
        pytest.raises(DataError, match=r"--source=mine:data failed at .*FileNotFoundError"),
        own_code("source", "mine:data"),
    ):
        Path("/nowhere/at_all.npz").read_bytes()
    with pytest.raises(ConfigError), own_code("model", "mine:model"):
        Path("/nowhere/at_all.npz").read_bytes()


@pytest.mark.parametrize("text", ["false", "no", "off", "[True,false]"])
def test_a_text_for_a_switch_is_refused(text):
    """It would count as true."""

    def model(mode="fast", tied=True, width=3, weights: bool | str = False): ...

    check_switches("model_args", {"mode": text, "tied": False, "width": 1}, model)
    check_switches("model_args", {"tied": 0, "weights": "imagenet"}, model)
    with pytest.raises(ConfigError, match=r"^--model_args: tied=.* write tied=True, or tied=False if that is meant\. "):
        check_switches("model_args", {"tied": text}, model)
