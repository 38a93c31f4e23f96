"""Temporarily replaces attributes of objects and classes of other packages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def attribute_replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Context manager: owner.name is `value` inside; bypasses Keras' tracking. owner: an object or a class."""
    base = type if isinstance(owner, type) else object
    missing = object()
    before = owner.__dict__.get(name, missing)
    base.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            base.__delattr__(owner, name)
        else:
            base.__setattr__(owner, name, before)
