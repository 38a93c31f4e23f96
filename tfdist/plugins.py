"""Names of parts: how `--model=cnn` or `--source=package.module:function` becomes a function, and what is said when it fails."""

from __future__ import annotations

import importlib
import re
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping
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
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not _NOT_OWN.search(frame.filename)]
    at = f" at {own[-1].filename}:{own[-1].lineno}, in {own[-1].name}" if own else ""
    return f"failed{at}: {type(error).__name__}: {textwrap.shorten(str(error), 600)}"


def resolve(flag: str, name: str, known: Mapping[str, Any]) -> Callable:
    """`name` as a function: what `known` has under it, a function or "module:function", or itself "module:function".

    Raises ConfigError, naming the flag, for an unknown name or a module that cannot be imported.
    """
    target = known.get(name, name)
    if not isinstance(target, str):
        return target
    module, colon, function = target.partition(":")
    if not colon:
        raise ConfigError(f"--{flag}={name} is unknown: use {', '.join(known)}, or package.module:function.")
    with own_code(flag, name):
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
                raise  # the module is there, but something that it imports is not
            raise ConfigError(
                f"--{flag}={name}: there is no module {module!r} on the Python path; start the command in its folder, or set "
                "PYTHONPATH.") from error
    if not callable(getattr(found, function, None)):
        raise ConfigError(f"--{flag}={name}: the module {module} has no function {function!r}.")
    return getattr(found, function)
