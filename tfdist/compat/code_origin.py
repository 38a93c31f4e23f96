"""Whose code something is, by the name of the package that it was written in.

Which packages count as the user's own is decided where it is asked, and differs on purpose: a layer of tfdist's is not
Keras' own, a loss of Keras' may hold a user's function, what a callback holds may be of Python's threads or files. Two
that ask something else stand apart: own_rows.py, for which a class that derives from Keras' is none of Keras', and
user_errors.py, which has lines of a traceback, and so files.
"""

from __future__ import annotations

from typing import Any


def package_of(module: str | None) -> str:
    """The first part of a module's name; "" if there is none."""
    return (module or "").partition(".")[0]


def module_of(value: Any) -> str:
    """The name of the module in which a function or a class was written; of another object, its class's."""
    return getattr(value, "__module__", None) or type(value).__module__


def is_of_keras(value: Any) -> bool:
    """Whether it is an object of a class of Keras' own."""
    return package_of(type(value).__module__) == "keras"
