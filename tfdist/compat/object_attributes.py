"""The attributes that an object itself holds, wherever Python keeps them."""

from __future__ import annotations

import inspect
from typing import Any


def slots_of(kind: type) -> list[str]:
    """The names of the attributes for which a class, or one that it inherits from, declares `__slots__`, in that order:
    variables that are found there have their place in a snapshot by it."""
    found: list[str] = []
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        declared = [slots] if isinstance(slots, str) else list(slots)
        members = [name for name, member in vars(each).items() if slots and inspect.ismemberdescriptor(member)]
        found += sorted(members, key=lambda name: declared.index(name) if name in declared else len(declared))
    return found


def attributes_of(value: Any) -> dict[str, Any]:
    """What an object holds in its `__dict__`, then in its slots, in an order that is the same in every process."""
    slots = {name: getattr(value, name) for name in slots_of(type(value)) if hasattr(value, name)}
    return getattr(value, "__dict__", {}) | slots
