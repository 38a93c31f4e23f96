"""Separates the records that layers make while a model is traced, for each replica of one process.

tf.distribute calls the model once per replica, each in its own thread, and switches to another thread wherever a
collective needs all replicas: in the middle of a forward pass, if BatchNormalization is synchronized. All threads
record in the same layers: the losses of one replica would be counted with another's, or cleared by it.
"""

from __future__ import annotations

import threading
from collections import UserList
from collections.abc import Callable, Iterator, MutableSet
from typing import Any

import keras

from tfdist.compat import keras_layers
from tfdist.control.exit_codes import UnsupportedError


class _Own:
    """A value per thread, made on first use."""

    def __init__(self, make: Callable[[], Any]):
        self._make, self._local = make, threading.local()

    def __call__(self) -> Any:
        if not hasattr(self._local, "value"):
            self._local.value = self._make()
        return self._local.value


class _ListPerThread(UserList):
    """A list with separate content in every thread."""

    def __init__(self) -> None:
        self._own = _Own(list)

    @property
    def data(self) -> list:
        return self._own()

    def __getitem__(self, place: Any) -> Any:
        return self.data[place]


class _SetPerThread(MutableSet):
    """A set with separate content in every thread."""

    def __init__(self) -> None:
        self._own = _Own(set)

    def __contains__(self, value: Any) -> bool:
        return value in self._own()

    def __iter__(self) -> Iterator:
        return iter(self._own())

    def __len__(self) -> int:
        return len(self._own())

    def add(self, value: Any) -> None:
        self._own().add(value)

    def discard(self, value: Any) -> None:
        self._own().discard(value)


def separate_replicas(model: keras.Model) -> None:
    """Gives every thread that calls the model separate records in all of its layers."""
    for layer in keras_layers.all_layers(model):
        losses, loss_ids = keras_layers.loss_records(layer)
        if not isinstance(losses, list | _ListPerThread) or not isinstance(loss_ids, set | _SetPerThread):
            raise UnsupportedError(
                f"Keras {keras.__version__} records losses in an unknown way, which several replicas in one process"
                " cannot share: install keras~=3.15."
            )
        keras_layers.set_loss_records(layer, _ListPerThread(), _SetPerThread())
