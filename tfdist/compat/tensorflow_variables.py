"""Puts back what variables held; reads large tables in place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable, ResourceVariable

from tfdist.compat.tensorflow_replicas import of_this_replica

_WRITERS = ("assign", "assign_add", "assign_sub", "scatter_add", "scatter_sub", "scatter_update", "scatter_nd_update")


@contextlib.contextmanager
def values_kept(variables: Sequence[Any]) -> Iterator[list[tuple[Any, np.ndarray]]]:
    """Context manager that restores these variables at exit. Yields each with its value."""
    kept = [(variable, variable.numpy()) for variable in variables]
    try:
        yield kept
    finally:
        for variable, value in kept:
            variable.assign(value)


@contextlib.contextmanager
def writes_undone() -> Iterator[None]:
    """Context manager that restores, at exit, the variables that eager code has written inside, wherever they are kept:
    also variables that no layer knows of. Relies on the classes behind tf.Variable, whose methods write; without them a
    state that a model hides from Keras changes when the model is tried.
    """
    kept: dict[int, tuple[tf.Variable, np.ndarray]] = {}
    classes = (BaseResourceVariable, ResourceVariable)
    originals = [(each, name, vars(each)[name]) for each in classes for name in _WRITERS if name in vars(each)]

    def keeping(write: Callable[..., Any]) -> Callable[..., Any]:
        def kept_first(variable: Any, *arguments: Any, **options: Any) -> Any:
            if tf.executing_eagerly():
                kept.setdefault(id(variable), (variable, variable.numpy()))
            return write(variable, *arguments, **options)

        return kept_first

    try:
        for each, name, write in originals:
            setattr(each, name, keeping(write))
        yield
    finally:
        for each, name, write in originals:
            setattr(each, name, write)
        for variable, value in kept.values():
            variable.assign(value)


def read_in_place(variable: tf.Variable) -> tf.Tensor:
    """The value without a copy, for callers that are done with it before the variable changes again: otherwise that
    change copies it.

    Relies on `read_value_no_copy` of a resource variable; without it TensorFlow copies a table whose rows have been
    changed one by one.
    """
    here = of_this_replica(variable)
    return here.read_value_no_copy() if hasattr(here, "read_value_no_copy") else tf.convert_to_tensor(variable)
