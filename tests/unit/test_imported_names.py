"""Names that tests, scripts and examples import from tfdist stand where they are looked for.

pyright looks at tfdist alone, and a test file with a stale import fails only when it is collected: in the slow part.
"""

import ast
import functools
from pathlib import Path

ROOTS = ("tfdist", "tests")


def module_file(name):
    base = Path(*name.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.exists()), None)


@functools.cache
def names_of(path):
    """What a module binds outside its functions and classes."""
    names, waiting = set(), [ast.parse(path.read_text())]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif not isinstance(node, ast.Lambda):
                waiting.append(node)
    return names


def missing_in(source):
    """The imports of a source text that nothing answers, each as `module.name`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in ROOTS and not (module_file(alias.name) or is_folder(alias.name)):
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module.split(".")[0] in ROOTS:
            file = module_file(node.module)
            bound = names_of(file) if file else set()
            if "__getattr__" in bound:
                continue  # imports when asked
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                if alias.name != "*" and alias.name not in bound and not (module_file(inside) or is_folder(inside)):
                    yield inside


def is_folder(name):
    return Path(*name.split(".")).is_dir()


def test_every_name_that_is_imported_exists():
    sources = [path for room in ("tests", "scripts", "examples") for path in Path(room).rglob("*.py")]
    wrong = [f"{path}: {name}" for path in sources for name in missing_in(path.read_text())]
    assert not wrong, "\n".join(wrong)


def test_a_name_that_moved_is_seen():
    source = "def f():\n    from tfdist.artifacts.remote_snapshots import bring_for_reading, RemoteSnapshots\n"
    assert list(missing_in(source)) == ["tfdist.artifacts.remote_snapshots.bring_for_reading"]
    assert list(missing_in("import tfdist.control.gone")) == ["tfdist.control.gone"]
