"""python -m tfdist.script SCRIPT [ARGS]: runs your Python script so that errors of tfdist end it with their exit codes;
with -m MODULE in place of SCRIPT it runs a module, as `python -m` does.

This is what `python -m tfdist.launch --workers=2 -- script.py ARGS` starts on every worker. Without it, an error would
end the program with a traceback and code 1, and a supervisor could not tell a lost peer from a mistake.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

from tfdist.control import exit_codes, token
from tfdist.control.command_parser import check_module, module_named_in
from tfdist.control.exit_codes import ConfigError
from tfdist.control.resolvers import resolve_cluster
from tfdist.control.terminal import say


def main(argv: list[str]) -> int:
    if argv[:1] in (["--help"], ["-h"]):
        print(__doc__)
        return 0
    if not argv:
        raise ConfigError("No script is given: name a Python file that calls tfdist.fit.")
    token.read(os.environ)  # before the program, or processes that it starts, can see it there
    name, program = _program(argv)
    try:
        program()
    except SystemExit as end:
        if end.code in (None, 0):
            _say_if_alone(name)
        raise
    _say_if_alone(name)
    return 0


def _program(argv: list[str]) -> tuple[str, Callable[[], object]]:
    """(its name, a function that runs it). Raises ConfigError."""
    if module := module_named_in(argv):
        check_module(module)
        sys.argv = argv[1:]
        return module, lambda: runpy.run_module(module, run_name="__main__", alter_sys=True)
    script = Path(argv[0])
    if not script.is_file():
        what = "is not a file" if script.exists() else "does not exist"
        raise ConfigError(f"{script} {what}: name a Python file that calls tfdist.fit.")
    if script.suffix not in (".py", ""):
        raise ConfigError(f"{script} is not a Python script: name a file that ends in .py.")
    sys.argv = argv
    sys.path[0] = str(script.resolve().parent)  # as `python script.py` does
    return str(script), lambda: runpy.run_path(str(script), run_name="__main__")


def _say_if_alone(program: str) -> None:
    """Warns if a program for several workers has ended without having joined them."""
    joining, factory = (sys.modules.get(f"tfdist.{name}") for name in ("keras_fit.joining", "runtime.factory"))
    if joining and joining.has_joined() or factory and factory.has_started():
        return
    cluster = resolve_cluster(os.environ)
    if cluster.size > 1 and cluster.is_chief:
        say(
            f"{program} ended without calling tfdist.fit, evaluate, predict or spread: unless it divides the work"
            f" itself, each of the {cluster.size} workers has done all of it. Write tfdist.fit(model, ...) instead of"
            " model.fit(...)."
        )


if __name__ == "__main__":
    exit_codes.run_command(main, sys.argv[1:])
