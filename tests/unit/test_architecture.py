"""The rules of the rooms, read from the imports and the files."""

import ast
import functools
from pathlib import Path

import tfdist
from tfdist.config.strategies import STRATEGIES

PACKAGE = Path("tfdist")
COMMANDS = {
    "train",
    "launch",
    "evaluate",
    "plan",
    "jobs",
    "report",
    "script",
    "comm",
    "doctor",
    "completion",
    "__main__",
}
# A room may import the rooms of lower levels, and its own.
LEVEL = {
    "control": 0,
    "launcher": 1,
    **dict.fromkeys(("compat", "storage", "plugins"), 1),
    "config": 2,
    **dict.fromkeys(("flags", "runtime"), 3),
    **dict.fromkeys(("data", "models", "telemetry", "artifacts"), 4),
    "planner": 5,
    "diagnosis": 5,
    **dict.fromkeys(("training", "communication"), 6),
    **dict.fromkeys(("build", "keras_fit"), 7),
    "run": 8,
    **dict.fromkeys(COMMANDS, 9),
    "train": 10,  # which may turn out to be an evaluator
    "completion": 10,  # of the flags of the others
}
NO_TENSORFLOW = (
    "control",
    "launcher",
    "config",
    "storage",
    "runtime/factory",
    "flags",
    "plugins",
    "planner",
    "data/batch_plan",
    "data/sources/source_facts",
    "data/sources/source_names",
    "models/cnn_sizes",
    "models/model_names",
    "models/transformer_sizes",
    *COMMANDS,
)


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
            if parts[0] != "tfdist" or len(parts) == 1 or parts[1] not in LEVEL or parts[1] == room(path):
                continue
            if LEVEL[parts[1]] >= LEVEL[room(path)]:
                wrong.append(f"{path} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_by_way_of_others():
    names = {".".join(path.with_suffix("").parts): path for path in modules()}
    below = {
        name: {other for other in imported(path, top_level_only=True) if other in names} for name, path in names.items()
    }
    while ready := [name for name, others in below.items() if not others & set(below)]:
        for name in ready:
            del below[name]
    assert not below, below


def test_every_room_has_a_level():
    assert {room(path) for path in modules()} == set(LEVEL)


def test_no_tensorflow_where_answers_must_be_instant():
    wrong = []
    for path in modules():
        name = path.relative_to(PACKAGE).with_suffix("").as_posix()
        if any(name == quick or name.startswith(f"{quick}/") for quick in NO_TENSORFLOW):
            for other in imported(path, top_level_only=True):
                if other.split(".")[0] in ("tensorflow", "keras", "numpy", "sklearn"):
                    wrong.append(f"{path} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_nothing_that_could_execute_what_it_reads():
    """What comes from another process is read by runtime/encoding.py or as JSON."""
    wrong = {
        f"{path} imports {name}"
        for path in modules()
        for name in imported(path)
        if name.split(".")[0] in ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")
    }
    assert not wrong, wrong


def test_only_the_runtime_touches_distribution():
    wrong = [
        str(path)
        for path in modules()
        if room(path) != "runtime"
        and "tf.distribute"
        in "".join(
            line
            for line in path.read_text().splitlines()
            if not line.strip().startswith("#") and '"""' not in line and "tf.distribute." in line
        )
    ]
    assert not wrong, wrong


# Where a strategy's name may stand: the registry, the choice of one, the checks of the configuration.
NAMES_OF_STRATEGIES = ("config/strategies.py", "runtime/factory.py", "config/checks.py")


@functools.cache
def runtime_classes():
    """The names of all classes that implement the protocol."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for path in (PACKAGE / "runtime").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    found = {"Runtime", "RuntimeDefaults"}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found


def asks_who_it_is(tree, in_runtime=False):
    """Lines that go by a runtime's class or by a strategy's name, and not by what it can do."""
    classes = runtime_classes()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
        ):
            asked = {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node.args[1])}
            if asked & classes:
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Compare) and any(_is_a_name(part) for part in (node.left, *node.comparators)):
            yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Constant) and node.value in STRATEGIES and not in_runtime:
            yield f"{node.lineno}: {node.value!r}"


def _is_a_name(node):
    """Whether it is a strategy's name: `strategy`, `config.strategy.strategy`, `runtime.name`."""
    if isinstance(node, ast.Attribute) and node.attr == "name":
        return isinstance(node.value, ast.Name) and node.value.id in ("runtime", "self")
    return getattr(node, "attr", getattr(node, "id", "")) == "strategy"


def test_nobody_asks_a_runtime_who_it_is():
    wrong = [
        f"{path}:{line}"
        for path in modules()
        if path.relative_to(PACKAGE).as_posix() not in NAMES_OF_STRATEGIES
        for line in asks_who_it_is(ast.parse(path.read_text()), in_runtime=room(path) == "runtime")
    ]
    assert not wrong, "\n".join(wrong)


def test_the_rule_about_runtimes_finds_what_it_should():
    for line in (
        "isinstance(runtime, Sockets)",
        "isinstance(runtime, (int, mesh_runtime.MeshRuntime))",
        "config.strategy.strategy == name",
        "strategy in known",
        "runtime.name != 'mesh'",
        "name = 'mesh'",
    ):
        assert list(asks_who_it_is(ast.parse(line))), line
    assert not list(asks_who_it_is(ast.parse("name = 'mesh'"), in_runtime=True))  # what a runtime is called


def private_names_of_others(tree):
    """Lines that use what TensorFlow, Keras, or an object that this file does not define, keeps to itself."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    used = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            for name in names:
                if name.startswith(("tensorflow.python", "keras.src")) or "__internal__" in name:
                    yield f"{node.lineno}: {name}"
        elif isinstance(node, ast.Attribute) and node.attr == "__internal__":
            yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            if (
                isinstance(node.value, ast.Name)
                and node.value.id in ("self", "cls")
                and isinstance(node.ctx, ast.Store)
            ):
                own.add(node.attr)
            used.append(node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            name = getattr(node.args[1], "value", "")
            if isinstance(name, str) and name.startswith("_") and not name.startswith("__"):
                yield f"{node.lineno}: {ast.unparse(node)}"
    for node in used:
        of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        of_parent = isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super"
        if node.attr not in own and not of_self and not of_parent:
            yield f"{node.lineno}: {ast.unparse(node)}"


def test_private_names_of_others_stand_in_compat():
    """Python's own may be used, and what a NamedTuple has for everybody."""
    public = ("os._exit", "sys._getframe", "sys._current_frames", "._replace", "._asdict", "._fields", "'_fields')")
    wrong = [
        f"{path}:{line}"
        for path in modules()
        if room(path) != "compat"
        for line in private_names_of_others(ast.parse(path.read_text()))
        if not line.endswith(public)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_rule_about_private_names_finds_what_it_should():
    for line in (
        "from tensorflow.python.eager import context",
        "import keras.src",
        "from keras.src import backend",
        "tf.__internal__.autograph",
        "model._flatten_layers()",
        "self.iterator._steps_seen",
        "getattr(strategy.extended, '_collective_keys')",
    ):
        assert list(private_names_of_others(ast.parse(line))), line
    for line in ("self._own", "super()._run()", "def _f(): pass\nmodule._f()"):
        assert not list(private_names_of_others(ast.parse(line))), line


def test_files_say_what_lives_in_them_and_stay_small():
    for path in modules():
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} does not say what lives in it"
        limit = 150 if path == PACKAGE / "training/loop.py" else 300
        assert len(path.read_text().splitlines()) <= limit, f"{path} has more than {limit} lines"
        assert path.stem not in ("utils", "common", "helpers")


def test_a_file_name_stands_once():
    names = [path.name for path in modules() if path.name != "__init__.py"]
    assert len(names) == len(set(names)), sorted(name for name in set(names) if names.count(name) > 1)


MANY_PARAMETERS = {  # Keras' own signatures; and what --model_args takes, by name
    "tfdist/keras_fit/api.py": ("fit", "evaluate"),
    "tfdist/models/transformer.py": ("transformer",),
    "tfdist/models/vit.py": ("vit",),
}


def test_few_parameters():
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = sum(argument.arg not in ("self", "cls") for argument in given)
                excepted = node.name in MANY_PARAMETERS.get(str(path), ())
                assert excepted or count <= 8, f"{path}: {node.name} has {count} parameters"


def test_long_functions():
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}: {node.name} has more than 60 lines"


def test_the_documentation_has_the_table_of_exit_codes():
    from tfdist.control.exit_codes import MEANING, RESTARTABLE

    page = Path("docs/exit_codes.md").read_text()
    for code, meaning in MEANING.items():
        assert f"| {code.value} | {code.name} | {meaning} | {'yes' if code in RESTARTABLE else 'no'} |" in page, code


def test_what_scripts_import_is_there():
    """Many of them import where they need it, which no other test looks at."""
    for path in sorted(Path("scripts").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("tfdist", "tests", "scripts"):
                source = Path(*node.module.split("."))
                source = source.with_suffix(".py") if source.with_suffix(".py").exists() else source / "__init__.py"
                names = names_in(source) if source.exists() else set()
                names = names | {file.stem for file in source.parent.iterdir()}
                names |= set(tfdist.__all__) if node.module == "tfdist" else set()
                missing = {alias.name for alias in node.names} - names
                assert not missing, f"{path}: {node.module} has no {missing}"


@functools.cache
def names_in(path):
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        elif hasattr(node, "name"):
            found.add(node.name)
    return found
