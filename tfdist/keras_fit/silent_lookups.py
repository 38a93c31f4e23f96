"""Rows that a table does not have, in Keras' own loops in one process: NaN under XLA and on a GPU (missing_rows.py)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.temporary_attributes import replaced
from tfdist.models import missing_rows

_STEPS = ("train_step", "test_step", "predict_step")


@contextlib.contextmanager
def told(model: keras.Model) -> Iterator[None]:
    """The steps that Keras traces inside look up NaN for such rows; those that it has traced before stay as they are.
    (Not the whole loop: data is prepared on the CPU, which finds them by itself.)"""
    if not missing_rows.are_silent(bool(model.jit_compile)):
        yield
        return
    with contextlib.ExitStack() as stack:
        for name in _STEPS:
            stack.enter_context(replaced(model, name, _looking_up_nan(getattr(model, name))))
        stack.enter_context(replaced(model, "call", _telling(model.call)))
        yield


def _looking_up_nan(step: Callable) -> Callable:
    @tf.autograph.experimental.do_not_convert
    def called(*args: Any, **kwargs: Any) -> Any:
        with missing_rows.as_nan(True):
            return step(*args, **kwargs)

    return functools.update_wrapper(called, step)


def _telling(call: Callable) -> Callable:
    def called(*args: Any, **kwargs: Any) -> Any:
        return missing_rows.told(call(*args, **kwargs))

    return functools.update_wrapper(called, call)
