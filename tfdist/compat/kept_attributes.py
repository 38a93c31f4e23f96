"""Objects that are kept on a model of the user's: they live as long as it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import keras

Kept = TypeVar("Kept")


def kept_on(model: keras.Model, name: str, make: Callable[[], Kept], made_for: Any = None) -> Kept:
    """The object that is kept on the model as `name`: made at the first call, and again when `made_for` is another.

    Relies on Keras' leaving a model's attributes in its `__dict__`, and on `object.__setattr__` going past its tracking
    of attributes; without them the model would take layers and variables in the object for its own.
    """
    kept: tuple[Any, Kept] | None = model.__dict__.get(name)
    if kept is None or kept[0] != made_for:
        kept = made_for, make()
        object.__setattr__(model, name, kept)
    return kept[1]
