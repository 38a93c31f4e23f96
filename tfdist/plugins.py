"""Names of parts: how `--model=cnn` or `--source=package.module:function` becomes a function, and what is said when it fails."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tfdist.control.exit_codes import ConfigError, TfdistError

_NOT_OWN = re.compile(rf"site-packages/(keras|tensorflow)/|^<|^{re.escape(str(Path(__file__).parent))}/")


@contextmanager
def own_code(flag: str, name: str) -> Iterator[None]:
    """What fails in the user's own code is a ConfigError that says where in it; a lack of memory stays one."""
    try:
        yield
    except (TfdistError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ == "ResourceExhaustedError":  # TensorFlow's, which is not imported for this
            raise
        raise ConfigError(f"--{flag}={name} {failure(error)}") from error


def failure(error: BaseException) -> str:
    """"failed at FILE:LINE, in FUNCTION: what": the user's own line in which an error arose, and what it says."""
    places = [(frame.filename, frame.lineno, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    return _failure(places, f"{type(error).__name__}: {error}")


def failure_told(text: str) -> str:
    """The same of an error that TensorFlow tells as text with a traceback in it; "" if it has no line of the user's own."""
    places = [(file, int(line), name) for file, line, name in _PLACE.findall(text)]
    return _failure(places, _what(text)) if _own(places) else ""


_PLACE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_REWRITTEN = "in user code:"  # so begins what AutoGraph says of a function that it has rewritten


def _failure(places: Sequence[tuple[str, int, str]], what: str) -> str:
    if _REWRITTEN in what:
        places = [(file, int(line), name) for file, line, name in _PLACE.findall(what)]
        what = _what(what)
    own = _own(places)
    at = f" at {own[-1][0]}:{own[-1][1]}, in {own[-1][2]}" if own else ""
    return f"failed{at}: {textwrap.shorten(what, 600)}"


def _own(places: Sequence[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
    return [place for place in places if not _NOT_OWN.search(place[0])]


def _what(text: str) -> str:
    """The last "SomeError: words" of a text that begins a line."""
    found = re.findall(r"^\s*([\w.]*(?:Error|Exception|Interrupt|Iteration): .*)$", text, re.MULTILINE)
    return found[-1].strip() if found else text


def check_name(flag: str, name: str, known: Mapping[str, Any]) -> None:
    """Whether there can be such a part; imports nothing. Raises ConfigError, naming the flag."""
    module, colon, _ = name.partition(":")
    if name in known:
        return
    if not colon:
        raise ConfigError(f"--{flag}={name} is unknown: use {', '.join(known)}, or package.module:function.")
    if _is_path(module):
        if not (module.endswith(".py") and Path(module).is_file()):
            raise ConfigError(f"--{flag}={name}: there is no Python file {module}: give an existing one, or write package.module:function.")
    elif not (top := module.partition(".")[0]).isidentifier() or (top not in sys.modules and importlib.util.find_spec(top) is None):
        raise _no_module(flag, name, module)


def check_takes(flag: str, name: str, function: Callable, wanted: Sequence[str], otherwise: str) -> None:
    """Raises ConfigError unless `function` can be called with arguments `wanted`, by position. `otherwise`: what to do then."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions do not tell
        return
    try:
        signature.bind(*wanted)
    except TypeError:
        raise ConfigError(f"--{flag}={name} takes {signature}: {otherwise}.") from None


def resolve(flag: str, name: str, known: Mapping[str, Any]) -> Callable:
    """`name` as a function: what `known` has under it, a function or "module:function", or itself "module:function" or
    "path/of/a/file.py:function".

    Raises ConfigError, naming the flag, for an unknown name or a module that cannot be imported.
    """
    check_name(flag, name, known)
    target = known.get(name, name)
    if not isinstance(target, str):
        return target
    module, _, function = target.partition(":")
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
                raise  # the module is there, but something that it imports is not
            raise _no_module(flag, name, module) from error
    if file and Path(getattr(found, "__file__", None) or "").resolve() != file:
        raise ConfigError(f"--{flag}={name}: Python has another module {module!r} ({getattr(found, '__file__', 'built in')}): give the file another name.")
    if not callable(getattr(found, function, None)):
        raise ConfigError(f"--{flag}={name}: the module {module} has no function {function!r}.")
    return getattr(found, function)


def _is_path(module: str) -> bool:
    return "/" in module or "\\" in module or module.endswith(".py")


def _no_module(flag: str, name: str, module: str) -> ConfigError:
    return ConfigError(
        f"--{flag}={name}: there is no module {module!r} on the Python path; start the command in its folder, or set PYTHONPATH.")
