"""Checks the arguments of a public function before it does anything, and raises a readable error for wrong ones."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tfdist.control.exit_codes import ConfigError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def checked_arguments(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Wraps the function to raise ConfigError, not TypeError, for arguments that it does not have or lacks."""
    name, signature = f"tfdist.{function.__name__}", inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        for given in (each for each in kwargs if each not in signature.parameters):  # the same one first on all workers
            near = difflib.get_close_matches(given, signature.parameters, 1)
            fix = f"did you mean {near[0]}?" if near else f"it takes {', '.join(signature.parameters)}."
            raise ConfigError(f"{name} has no argument {given!r}: {fix}")
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(f"{name}: {error}: pass the model first, then its data.") from None
        return function(*args, **kwargs)

    return checked
