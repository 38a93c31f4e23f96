"""Checks at the start that all workers compute the same: compares their models, losses and user code.

Workers add up their gradients. A worker with a different activation or loss, or with last week's file of a model on its
disk, would contribute wrong gradients, and nothing would show it: the weights stay the same on all workers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import sys
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import keras
import numpy as np

from tfdist.compat import keras_layers
from tfdist.compat.code_origin import package_of
from tfdist.control.exit_codes import ConfigError
from tfdist.runtime.base import Runtime
from tfdist.runtime.decisions import texts_of_all
from tfdist.training.own_values import LIBRARIES, own_value

# Parts of Keras' configurations that may differ: names count the objects that a process has made so far, seeds are
# random or sent by the chief.
_MAY_DIFFER = ("name", "seed", "random_seed", "seed_generator", "build_config", "registered_name")
# Attributes not compared: methods that Keras has wrapped; losses and optimizers, which are compared separately; the
# functions and the history of a model's earlier runs.
_NO_FACTS = (
    *("build", "quantize", "call", "loss", "optimizer", "train_function", "test_function", "predict_function"),
    *("_losses", "_compile_loss", "_compile_metrics", "history"),
)
_MAIN = "__main__"  # each worker may run a different script; the functions and classes used from it must be the same

_SHOWN = 60  # characters of a value


class Fact(NamedTuple):
    """One thing that workers compare: its name, a checksum of its value, and the value itself if that is short."""

    what: str
    checksum: int
    shown: str = ""


Facts = list[Fact]


def must_be_same_model(runtime: Runtime, facts: Facts) -> None:
    """Raises ConfigError on all workers, naming the first difference, unless the facts of all are the same. A
    collective call."""
    text = json.dumps(facts)  # one byte per character
    sums = [fact.checksum for fact in facts]  # without names: a layer may be called dense_1 on one worker only
    rows = runtime.all_gather(np.array([zlib.crc32(repr(sums).encode()), len(text)], np.int64))
    if (rows[:, 0] == rows[0, 0]).all():
        return
    texts = texts_of_all(runtime, text, int(rows[:, 1].max()))
    found = [[Fact(*fact) for fact in json.loads(other)] for other in texts]
    for rank, other in enumerate(found):
        if (what := _first_difference(found[0], other)) is not None:
            raise ConfigError(
                f"Rank {rank} trains something else than rank 0; they differ first in {what}: give all workers the same"
                " code, which does the same on each."
            )


def _first_difference(first: Facts, other: Facts) -> str | None:
    for one, its in zip(first, other, strict=False):
        if one.checksum != its.checksum:
            values = f" ({one.shown} against {its.shown})" if one.shown and its.shown else ""
            return f"{one.what}{values}"
    return None if len(first) == len(other) else "how many files of the user's own there are"


def facts_of(
    model: keras.Model,
    own: Iterable[Any] = (),
    settings: Mapping[str, Any] | None = None,
    of_batches: Callable[[keras.Layer], Collection[str]] = lambda _: (),
) -> Facts:
    """Returns the facts to compare. own: the user's functions and objects beside the model's layers. settings:
    configurations, under the names by which the user knows them. of_batches: a layer's attributes that hold something
    of the batches that it has seen, and are not compared."""
    layers, own = keras_layers.all_layers(model), list(own)
    everywhere = [keras.config.floatx(), keras.config.epsilon(), keras.config.image_data_format()]
    found = [_fact("keras.config", everywhere), _fact("how many layers there are", len(layers))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns that lambdas cannot be written to a file
        for number, layer in enumerate(layers):
            found += _facts_of_layer(f"layer {number}, {layer.name}", layer, {*_NO_FACTS, *of_batches(layer)})
    for name, value in (settings or {}).items():
        found += _by_key(name, value)
    for each in own:
        found += _by_key(f"what {getattr(each, '__name__', type(each).__name__)} holds", own_value(each))
    texts = sorted(_own_code([*layers, *own]))
    return found + [Fact(name, zlib.crc32(text.encode())) for name, text in texts]


def _facts_of_layer(name: str, layer: keras.Layer, left_out: Collection[str]) -> Facts:
    config = {} if isinstance(layer, keras.Model) else _config(layer)
    policy = layer.dtype_policy.name if layer.dtype_policy is not None else ""
    held = {key: value for key, value in own_value(layer).items() if key not in left_out}
    kinds = [_fact(name, type(layer).__name__), _fact(f"{name}: its dtype policy", policy)]
    return [*kinds, *_by_key(name, config), *_by_key(name, held)]


def _by_key(name: str, value: Any) -> Facts:
    """Returns a fact for each entry of a mapping, or one fact for any other value."""
    if not isinstance(value, Mapping):
        return [_fact(name, value)]
    return [_fact(f"{name}: {key}", each) for key, each in sorted(value.items(), key=str) if key not in _MAY_DIFFER]


def _fact(what: str, value: Any) -> Fact:
    plain = _plain(value)
    text = json.dumps(plain)
    return Fact(what, zlib.crc32(text.encode()), text if len(text) <= _SHOWN and not isinstance(plain, list) else "")


def _config(layer: keras.Layer) -> Any:
    with contextlib.suppress(Exception):  # a user's own get_config may raise, or there may be none
        return layer.get_config()
    return None


def _plain(value: Any) -> Any:
    """Returns the value without the parts that may differ between workers that compute the same."""
    if isinstance(value, Mapping):
        if value.get("class_name") == "__lambda__":  # its code contains the name of its folder; see _own_code
            return "a lambda"
        return {str(key): _plain(each) for key, each in sorted(value.items(), key=str) if key not in _MAY_DIFFER}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, str):
        return "a path" if "/" in value else value  # each machine may have its own
    if isinstance(value, (int, float, bool, type(None))):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        return [str(value.dtype), list(value.shape), zlib.crc32(np.ascontiguousarray(value).tobytes())]
    if hasattr(value, "get_config"):
        with contextlib.suppress(Exception):
            return [type(value).__name__, _plain(value.get_config())]
    return getattr(value, "__qualname__", type(value).__name__)


def _own_code(objects: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Yields (place, text) of the user's modules that define these objects or their classes."""
    seen: set[Any] = set()
    for each in objects:
        for definition in _definitions(each):
            module = definition.__module__
            key = definition if module == _MAIN else module
            if key in seen or module is None or package_of(module) in (*LIBRARIES, "functools"):
                continue
            seen.add(key)
            with contextlib.suppress(OSError, TypeError, KeyError, AttributeError, UnicodeError):  # without a file
                if module == _MAIN:
                    yield f"the code of {definition.__qualname__}", inspect.getsource(definition)
                else:
                    file = Path(sys.modules[module].__file__ or "")
                    yield f"the file {file.name}", file.read_text()  # which treats all line endings alike


def _definitions(each: Any) -> list[Any]:
    if isinstance(each, functools.partial):
        return _definitions(each.func)
    if isinstance(each, FunctionType):
        return [each]
    if isinstance(each, type):
        return [kind for kind in each.__mro__ if kind is not object]
    held = [value for value in getattr(each, "__dict__", {}).values() if isinstance(value, FunctionType)]
    return [*(kind for kind in type(each).__mro__ if kind is not object), *held]
