"""Tensors that layers keep as attributes in a forward pass over own rows (`self.z = ...`), also in containers and in
objects of the user's own, and NumPy arrays and the number of rows: refused outside of the pass.

Such a tensor holds the rows of one worker, or numbers made of these alone. A train_step or compute_loss that read it
would take them for those of all rows. So after the pass an object is in its place that raises ConfigError when it is
used; during the next pass the tensor is back.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.artifacts.objects_inside import tensors_in
from tfdist.compat import keras_layers, keras_trainer
from tfdist.compat.code_origin import is_of_keras
from tfdist.control.exit_codes import ConfigError
from tfdist.keras_fit.worker_dependence import is_worker_dependent

OF_ONE_WORKER = (
    "may hold the rows of one worker only: return it from the call, add what you need of it with add_loss, or train in"
    " one process"
)
_kept: weakref.WeakKeyDictionary[keras.Layer, set[str]] = weakref.WeakKeyDictionary()  # layer -> names of attributes


def kept_by_calls(layer: keras.Layer) -> Collection[str]:
    """The attributes in which the layer has kept something of forward passes over own rows."""
    return _kept.get(layer, ())


class OfOwnRows:
    """Stands in place of a value that holds numbers of own rows."""

    def __init__(self, value: Any, layer: str, name: str):
        self.stands_for = value, layer, name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by Python itself, for example to copy the object
            raise AttributeError(name)
        return self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> Any:
        _, layer, name = self.stands_for
        raise keras_layers.keep_message(
            ConfigError(
                f"What the call of layer {layer} keeps as its attribute {keras_trainer.public_name(name)!r}"
                f" {OF_ONE_WORKER}."
            )
        )


_USES = """tf_tensor array getitem iter len contains call bool int float complex index round neg pos abs invert
eq ne lt le gt ge add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul
and rand or ror xor rxor"""
for _use in _USES.split():
    setattr(OfOwnRows, f"__{_use}__", OfOwnRows._refuse)


class KeptTensors:
    """The tensors that the layers of one model keep."""

    def __init__(self, model: keras.Model):
        self._model = model

    @contextlib.contextmanager
    def visible(self, in_a_trial: bool = False) -> Iterator[None]:
        """Context manager in which layers find the tensors that they have kept. in_a_trial: what they keep inside is
        made of the rows of a trial, or of a graph that is traced once more; it is forgotten."""
        shown = self.show()
        try:
            yield
        finally:
            for attributes, name, stand_in in shown:
                if in_a_trial or attributes.get(name) is stand_in.stands_for[0]:
                    attributes[name] = stand_in

    def show(self) -> list[tuple[dict[str, Any], str, OfOwnRows]]:
        """Puts the tensors back in their places. Returns what was there instead."""
        found = [
            (layer.__dict__, name, value)
            for layer in keras_layers.all_layers(self._model)
            for name, value in layer.__dict__.items()
            if isinstance(value, OfOwnRows)
        ]
        for attributes, name, stand_in in found:
            attributes[name] = stand_in.stands_for[0]
        return found

    @contextlib.contextmanager
    def hidden_afterwards(self, count: int | None = None) -> Iterator[None]:
        """Context manager for a forward pass over own rows: what layers keep of it is hidden at exit. count: the number
        of own rows, if Python knows it and the batch has another one; an attribute that becomes this number is hidden,
        too."""
        layers = keras_layers.all_layers(self._model)
        before = [dict(layer.__dict__) for layer in layers]
        known = {id(one) for attributes in before for value in attributes.values() for one in _values_in(value)}
        yield
        for layer, earlier in zip(layers, before, strict=True):
            counts = not is_of_keras(layer)
            for name, value in list(layer.__dict__.items()):
                is_count = counts and type(value) is int and value == count and not _is_number(earlier.get(name), value)
                if is_count or any(id(one) not in known and _may_hold_rows(one) for one in _values_in(value)):
                    layer.__dict__[name] = OfOwnRows(value, layer.name, name)
                    _kept.setdefault(layer, set()).add(name)


def _is_number(value: Any, number: int) -> bool:
    return type(value) is int and value == number  # not what a stand-in, an array or a tensor says to ==


def _values_in(value: Any) -> Sequence[Any]:
    """The tensors in an attribute, or the array that it is."""
    return [value] if isinstance(value, np.ndarray) else tensors_in(value)


def _may_hold_rows(tensor: Any) -> bool:
    """Whether the tensor or array may depend on the rows of this worker."""
    if tf.executing_eagerly():
        return True  # nothing tells of what an eager tensor was made
    if not hasattr(tensor, "graph"):
        return False  # a constant, while a graph is traced
    # The values of another graph, one that XLA compiles, do not come out of it at all.
    return tensor.graph is not tf.compat.v1.get_default_graph() or is_worker_dependent(tensor)
