"""The rules of the rooms, read from the imports and the files."""

import ast
from pathlib import Path

PACKAGE = Path("tfdist")
COMMANDS = {"train", "launch", "evaluate", "plan", "jobs", "report", "script", "comm"}
# A room may import the rooms of lower levels, and its own.
LEVEL = {"config": 0, "control": 0, "batch_plan": 1, "plugins": 1, "flags": 1, "runtime": 1, "planner": 2, "data": 2, "models": 2, "telemetry": 2, "artifacts": 2, "training": 3, "guard": 3, "communication": 3, "build": 4,
         "keras_fit": 4, "agreement": 4, "recovery": 5, "results": 5, "tune": 5, "diagnosis": 6, "session": 7, "ps_session": 8, "elastic": 8, **dict.fromkeys(COMMANDS, 9), "train": 10}  # which may turn out to be an evaluator
NO_TENSORFLOW = ("config", "batch_plan", "flags", "plugins", "control", "planner", *COMMANDS)


def modules():
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path, top_level_only=False):
    tree = ast.parse(path.read_text())
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_go_down():
    wrong = []
    for path in modules():
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "tfdist" and len(parts) > 1 and parts[1] in LEVEL and parts[1] != room(path) and LEVEL[parts[1]] >= LEVEL[room(path)] > 0:
                wrong.append(f"{path} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_every_room_has_a_level():
    assert {room(path) for path in modules()} == set(LEVEL)


def test_no_tensorflow_where_answers_must_be_instant():
    wrong = [f"{path} imports {name}" for path in modules() if room(path) in NO_TENSORFLOW for name in imported(path, top_level_only=True)
             if name.split(".")[0] in ("tensorflow", "keras", "numpy", "sklearn")]
    assert not wrong, "\n".join(wrong)


def test_nothing_that_could_execute_what_it_reads():
    """What comes from another process is read by runtime/encoding.py or as JSON."""
    wrong = {f"{path} imports {name}" for path in modules() for name in imported(path) if name.split(".")[0] in ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")}
    assert not wrong, wrong


def test_only_the_runtime_touches_distribution():
    wrong = [str(path) for path in modules() if room(path) != "runtime" and "tf.distribute" in "".join(
        line for line in path.read_text().splitlines() if not line.strip().startswith("#") and '"""' not in line and "tf.distribute." in line)]
    assert not wrong, wrong


def test_files_say_what_lives_in_them_and_stay_small():
    for path in modules():
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} does not say what lives in it"
        limit = 150 if path == PACKAGE / "training/loop.py" else 500 if path == PACKAGE / "config.py" else 300
        assert len(path.read_text().splitlines()) <= limit, f"{path} has more than {limit} lines"
        assert path.stem not in ("utils", "common", "helpers")


def test_long_functions():
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}: {node.name} has more than 60 lines"


def test_the_readme_has_the_table_of_exit_codes():
    from tfdist.control.exit_codes import MEANING, RESTARTABLE

    readme = Path("README.md").read_text()
    for code, meaning in MEANING.items():
        assert f"| {code.value} | {code.name} | {meaning} | {'yes' if code in RESTARTABLE else 'no'} |" in readme, code
