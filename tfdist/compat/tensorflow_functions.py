"""Functions of the user's own inside a trace."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.eager.polymorphic_function import autograph_util
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

from tfdist.compat.temporary_attributes import attribute_replaced

_traced_also_inline: weakref.WeakSet[Any] = weakref.WeakSet()


def always_traced(function: Any) -> Any:
    """A tf.function, without AutoGraph, that is traced within `functions_inline` as well."""
    traced = tf.function(function, autograph=False)
    _traced_also_inline.add(traced)
    return traced


@contextlib.contextmanager
def functions_inline() -> Iterator[None]:
    """A context in which a tf.function that this thread calls is computed where it is called, as the Python function
    that AutoGraph makes of it, and keeps nothing of it: one that a layer holds would be called again in training, with
    what it was traced with in a trial. Relies on `Function.__call__` and what is behind `python_function`; without them
    such a layer is trained with the weights and without the dropout of a trial.
    """
    here, call = threading.get_ident(), Function.__call__

    def inline(function: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != here or function in _traced_also_inline:
            return call(function, *args, **kwargs)
        python, options = function.python_function, function._experimental_autograph_options
        if function._autograph:
            python = autograph_util.py_func_from_autograph(python, options)
        args, kwargs = tf.nest.map_structure(
            lambda leaf: tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf, (args, kwargs)
        )
        status = ag_ctx.Status.ENABLED if function._autograph else ag_ctx.Status.DISABLED
        with ag_ctx.ControlStatusCtx(status, options):
            return python(*args, **kwargs)

    with attribute_replaced(Function, "__call__", inline):
        yield
