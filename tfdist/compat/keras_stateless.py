"""Temporary values of variables, in keras.StatelessScope and Layer.stateless_call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf
from keras.src.backend.common.global_state import get_global_attribute, set_global_attribute

_SCOPE = "stateless_scope"


@contextlib.contextmanager
def float_values(replace: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]) -> Iterator[None]:
    """Context manager in which `replace` gives new floating-point values to the surrounding scope, if any. At exit the
    old values return, except where a value was updated inside. Relies on the global attribute "stateless_scope" and on
    `StatelessScope.state_mapping`, a dict; without them the gradient with respect to such a value covers only one
    worker's rows."""
    scope = get_global_attribute(_SCOPE)
    values = {} if scope is None else scope.state_mapping
    before = {key: value for key, value in values.items() if isinstance(value, tf.Tensor) and value.dtype.is_floating}
    inside = dict(zip(before, replace(list(before.values())), strict=True)) if before else {}
    values.update(inside)
    try:
        yield
    finally:
        values.update({key: before[key] for key, value in inside.items() if values.get(key) is value})


@contextlib.contextmanager
def left() -> Iterator[None]:
    """Context manager in which variables have their own values, whatever scope surrounds it. Relies on the same
    attribute; without it a model cannot be tried while it is called with the values of a graph."""
    around = get_global_attribute(_SCOPE)
    set_global_attribute(_SCOPE, None)
    try:
        yield
    finally:
        set_global_attribute(_SCOPE, around)


def is_here() -> bool:
    """Whether a stateless scope is active. Relies on the same attribute."""
    return get_global_attribute(_SCOPE) is not None
