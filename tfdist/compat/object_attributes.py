"""The attributes that an object itself holds, wherever Python keeps them."""

from __future__ import annotations

import inspect
from typing import Any


def slots_of(kind: type) -> list[str]:
    """The names of the attributes for which a class, or one that it inherits from, declares `__slots__`."""
    declaring = [each for each in kind.__mro__ if "__slots__" in vars(each)]
    return [name for each in declaring for name, member in vars(each).items() if inspect.ismemberdescriptor(member)]


def attributes_of(value: Any) -> dict[str, Any]:
    """What an object holds in its `__dict__`, then in its slots, in an order that is the same in every process."""
    slots = {name: getattr(value, name) for name in slots_of(type(value)) if hasattr(value, name)}
    return getattr(value, "__dict__", {}) | slots
