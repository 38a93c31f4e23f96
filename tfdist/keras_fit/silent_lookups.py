"""Lookups of rows that a table does not have, in Keras' own loops in one process: NaN under XLA and on a GPU
(missing_rows.py)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_trainer
from tfdist.compat.kept_attributes import kept_on
from tfdist.compat.temporary_attributes import attribute_replaced
from tfdist.keras_fit.loops import Loop
from tfdist.models import missing_rows


@contextlib.contextmanager
def watched(model: keras.Model) -> Iterator[None]:
    """Context manager in which Keras' steps get NaN for such rows. (Not the whole loop: data is prepared on the CPU,
    which itself raises an error for them.)"""
    if not missing_rows.are_silent(bool(model.jit_compile)):
        yield
        return
    # Functions that Keras has traced outside are not used inside, nor the other way round.
    functions = _kept(model)
    with contextlib.ExitStack() as stack:
        for loop in Loop:
            stack.enter_context(attribute_replaced(model, loop.step_name, _looking_up_nan(loop.step_of(model))))
            stack.enter_context(attribute_replaced(model, loop.function_name, functions.get(loop)))
        stack.enter_context(attribute_replaced(model, "call", _looking_up_nan(model.call)))
        yield
        functions.update({loop: getattr(model, loop.function_name) for loop in Loop})


def _kept(model: keras.Model) -> dict[Loop, Any]:
    """The functions that were made inside earlier, while the model was compiled as it is now."""
    return kept_on(model, "_tfdist_looking_up_nan", dict[Loop, Any], keras_trainer.traced_for(model))


def _looking_up_nan(function: Callable) -> Callable:
    @tf.autograph.experimental.do_not_convert
    def called(*args: Any, **kwargs: Any) -> Any:
        with missing_rows.as_nan(True):
            return missing_rows.poisoned(function(*args, **kwargs))

    return functools.update_wrapper(called, function)
