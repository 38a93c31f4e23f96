"""Names of parts: how `--model=cnn` or `--source=package.module:function` becomes a function, and the error messages if
this fails.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from tfdist.control.exit_codes import ConfigError, TfdistError
from tfdist.control.passing_errors import may_pass, reading_failed
from tfdist.control.user_errors import failure


@contextmanager
def own_code(flag: str, name: str) -> Iterator[None]:
    """Context manager that turns errors in the user's code into a ConfigError that says where; MemoryError is kept."""
    try:
        yield
    except (TfdistError, MemoryError):
        raise
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except SystemExit as end:  # else the run would end as if all were well, or with a code that means something else
        raise ConfigError(
            f"--{flag}={name} ended the program (sys.exit({end.code!r})): let it return or raise."
        ) from end
    except BaseException as error:
        if type(error).__name__ == "ResourceExhaustedError":  # by name: TensorFlow is not imported for this
            raise
        words = f"--{flag}={name} {failure(error)}"
        # An error of a file, or of its file system.
        of_data = flag == "source" and (isinstance(error, OSError) or may_pass(error))
        raise (reading_failed(words, error) if of_data else ConfigError(words)) from error


def check_name(flag: str, name: str, known: Mapping[str, Any]) -> None:
    """Checks that such a part can exist; imports nothing. Raises ConfigError, naming the flag."""
    module, colon, _ = name.partition(":")
    if name in known:
        return
    if not colon:
        raise ConfigError(f"--{flag}={name} is unknown: use {', '.join(known)}, or package.module:function.")
    if _is_path(module):
        if not (module.endswith(".py") and Path(module).is_file()):
            raise ConfigError(
                f"--{flag}={name}: there is no Python file {module}: give an existing one, or write"
                " package.module:function."
            )
    elif not (top := module.partition(".")[0]).isidentifier() or (
        top not in sys.modules and importlib.util.find_spec(top) is None
    ):
        raise _no_module(flag, name, module)


def check_takes(flag: str, name: str, function: Callable, wanted: Sequence[str], otherwise: str) -> None:
    """Raises ConfigError unless `function` can be called with the positional arguments `wanted`.

    otherwise: what the user should do then.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have no signature
        return
    try:
        signature.bind(*wanted)
    except TypeError:
        raise ConfigError(f"--{flag}={name} takes {signature}: {otherwise}.") from None


def check_switches(flag: str, options: Mapping[str, Any], function: Callable) -> None:
    """Raises ConfigError if `options` have a text for a parameter of `function` whose default is True or False: Python
    counts every text as true. Not if its annotation admits texts.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some built-in functions have no signature
        return
    for name, value in options.items():
        if not isinstance(value, str) or name not in parameters or not isinstance(parameters[name].default, bool):
            continue
        if not re.search(r"\bstr\b|Literal", str(parameters[name].annotation)):
            raise ConfigError(
                f"--{flag}: {name}={value} is a text, which Python counts as true: write {name}=True, or {name}=False"
                f" if that is meant. (If it takes texts, too, declare it so: {name}: bool | str.)"
            )


def resolve(flag: str, name: str, known: Mapping[str, Any]) -> Callable:
    """Resolves `name` to a function: either the entry of `known` (a function or "module:function"), or `name` itself as
    "module:function" or "path/of/a/file.py:function".

    Raises ConfigError, naming the flag, for an unknown name or a module that cannot be imported.
    """
    check_name(flag, name, known)
    target = known.get(name, name)
    if not isinstance(target, str):
        return target
    found = imported(flag, name, target)
    if not callable(found):
        module, _, function = target.rpartition(":")
        module = Path(module).stem if _is_path(module) else module
        there = ", ".join(_functions_of(sys.modules[module]))
        raise ConfigError(
            f"--{flag}={name}: the module {module} has no function {function!r}"
            + (f"; it has {there}." if there else ".")
        )
    return found


def _functions_of(module: ModuleType) -> list[str]:
    """The names of what a module itself defines and offers to be called."""
    return [
        name
        for name, each in vars(module).items()
        if callable(each) and not name.startswith("_") and getattr(each, "__module__", "") == module.__name__
    ]


def imported(flag: str, name: str, target: str) -> Any:
    """Imports the object in "module:name" or "path/of/a/file.py:name"; None if the module has no such name.

    Raises ConfigError, naming the flag and its value `name`, for a module that cannot be imported.
    """
    module, _, attribute = target.partition(":")
    file = Path(module).resolve() if _is_path(module) else None
    if file:
        module = file.stem
        if str(file.parent) not in sys.path:
            sys.path.insert(0, str(file.parent))
    with own_code(flag, name):
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
                raise  # the module exists, but something that it imports does not
            raise _no_module(flag, name, module) from error
    if file and Path(getattr(found, "__file__", None) or "").resolve() != file:
        raise ConfigError(
            f"--{flag}={name}: Python has another module {module!r} ({getattr(found, '__file__', 'built in')}): give"
            " the file another name."
        )
    return getattr(found, attribute, None)


def _is_path(module: str) -> bool:
    return "/" in module or "\\" in module or module.endswith(".py")


def _no_module(flag: str, name: str, module: str) -> ConfigError:
    return ConfigError(
        f"--{flag}={name}: there is no module {module!r} on the Python path; start the command in its folder, or set"
        " PYTHONPATH."
    )
