"""The names of the data sources, and how a name, or package.module:function, becomes a Split.

A new source is a file in this folder with `load(config, split) -> Split` and one line here. Sources are imported when
they are asked for, so that one with additional dependencies costs the others nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.config import DataConfig
from tfdist.control.exit_codes import ConfigError
from tfdist.data.sources.base import SPLITS, Split

SOURCES = {
    "digits": "tfdist.data.sources.digits:load",
    "synthetic": "tfdist.data.sources.synthetic:load",
    "text": "tfdist.data.sources.text:load",
    "tfds": "tfdist.data.sources.tfds:load",
    "tfrecord": "tfdist.data.sources.tfrecord:load",
}
_USER = "tfdist.data.sources.user:load"


def load_split(config: DataConfig, split: str) -> Split:
    """The "train" or "eval" split of `--source`. Raises ConfigError for an unknown name, DataError for bad data."""
    assert split in SPLITS, split
    load = resolve("source", _USER if ":" in config.source else config.source, SOURCES)
    return load(config, split).check()


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
