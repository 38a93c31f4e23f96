"""Keeps objects on a model or a callback of the user's: they live as long as it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import keras

Kept = TypeVar("Kept")


def kept_on(
    holder: keras.Model | keras.callbacks.Callback, name: str, make: Callable[[], Kept], made_for: Any = None
) -> Kept:
    """Returns the object kept on the holder as `name`; makes it at the first call, and again when `made_for` changes.

    Relies on Keras keeping a model's attributes in its `__dict__`, and on `object.__setattr__` bypassing its tracking
    of attributes; otherwise the model would adopt the layers and variables in the object as its own.
    """
    kept: tuple[Any, Kept] | None = holder.__dict__.get(name)
    if kept is None or kept[0] != made_for:
        kept = made_for, make()
        object.__setattr__(holder, name, kept)
    return kept[1]
