"""Names of parts: how `--model=cnn` or `--source=package.module:function` becomes a function."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.control.exit_codes import ConfigError


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
