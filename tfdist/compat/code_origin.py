"""Finds out whose code something is, by the name of the package in which it was written.

The callers decide which packages count as the user's own, and differ on purpose: a layer of tfdist is not one of Keras,
a loss of Keras may hold a user's function, and a callback may hold objects of Python's threading or file modules. Two
modules ask another question and do not use this one: own_rows.py, where a class derived from a Keras class does not
count as Keras', and user_errors.py, which reads the lines of a traceback, and so works with files.
"""

from __future__ import annotations

from typing import Any


def package_of(module: str | None) -> str:
    """The first part of a module's name; "" if there is none."""
    return (module or "").partition(".")[0]


def module_of(value: Any) -> str:
    """The name of the module in which a function or a class was written; for other objects, that of their class."""
    return getattr(value, "__module__", None) or type(value).__module__


def is_of_keras(value: Any) -> bool:
    """Whether `value` is an instance of one of Keras' own classes."""
    return package_of(type(value).__module__) == "keras"
