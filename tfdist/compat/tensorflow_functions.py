"""tf.functions that are called inside a trace: computed in place, or traced as well."""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.eager.polymorphic_function import autograph_util
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

from tfdist.compat.tensorflow_graphs import draws_anew, kinds_of_operations

IN_PLACE = "tfdist_in_place"  # in the names of operations of functions that are computed in place
_call_as_ever = Function.__call__
_traced_also_inline: weakref.WeakSet[Any] = weakref.WeakSet()
# Of each thread. every, drawing: the contexts that it is in, of each kind.
_here = threading.local()
_lock, _entered = threading.Lock(), 0  # contexts of all threads; replicas' threads leave in any order


def always_traced(function: Any, jit_compile: bool = False) -> Any:
    """Returns a tf.function, without AutoGraph, that is traced even within `functions_inline`."""
    traced = tf.function(function, autograph=False, jit_compile=jit_compile or None)
    _traced_also_inline.add(traced)
    return traced


@contextlib.contextmanager
def functions_inline(drawing: bool = False) -> Iterator[None]:
    """Context manager in which a tf.function that this thread calls is computed in place, and keeps no trace. drawing:
    only one that has a trace which draws by tf.random, with the seeds of where it was traced.

    Otherwise a function that a layer holds would be called in training with its trace from a trial: without dropout,
    with constants in place of weights. AutoGraph converts it as usual. Relies on `Function.__call__`, on
    `Function._function_cache`, and on the internals behind `python_function`; without them such a layer is trained
    wrongly.
    """
    global _entered
    kind = "drawing" if drawing else "every"
    with _lock:
        if not _entered:
            Function.__call__ = _call  # pyright: ignore[reportAttributeAccessIssue] - `self` is called `function`
        _entered += 1
    setattr(_here, kind, getattr(_here, kind, 0) + 1)
    try:
        yield
    finally:
        setattr(_here, kind, getattr(_here, kind) - 1)
        with _lock:
            _entered -= 1
            if not _entered:
                Function.__call__ = _call_as_ever


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    is_inline = getattr(_here, "every", 0) or (getattr(_here, "drawing", 0) and _has_drawn(function))
    if not is_inline or function in _traced_also_inline:
        return _call_as_ever(function, *args, **kwargs)
    python, options = function.python_function, function._experimental_autograph_options
    args, kwargs = _as_given_to_a_trace(function, args, kwargs)
    if function._autograph:
        python = autograph_util.py_func_from_autograph(python, options)
    status = ag_ctx.Status.ENABLED if function._autograph else ag_ctx.Status.DISABLED
    # Names outside of the function are those that they are where it is traced as well.
    with ag_ctx.ControlStatusCtx(status, options), tf.name_scope(IN_PLACE):
        found = python(*args, **kwargs)
    return tf.nest.map_structure(lambda leaf: _tensor(leaf, (bool, int, float)), found)


def _has_drawn(function: Any) -> bool:
    return any(
        draws_anew(kind) for trace in function._function_cache.values() for kind in kinds_of_operations(trace.graph)[0]
    )


def _as_given_to_a_trace(function: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Arrays become tensors; so do arguments that the `input_signature` describes, in its dtype."""
    names = list(inspect.signature(function.python_function).parameters)
    specs = dict(zip(names, function.input_signature or (), strict=False))

    def given(name: str | None, value: Any) -> Any:
        spec = specs.get(name or "")
        if isinstance(spec, tf.TensorSpec) and not isinstance(value, (tf.Tensor, tf.Variable)):
            return tf.convert_to_tensor(value, spec.dtype)
        return tf.nest.map_structure(_tensor, value)

    placed = tuple(given(names[place] if place < len(names) else None, value) for place, value in enumerate(args))
    return placed, {name: given(name, value) for name, value in kwargs.items()}


def _tensor(leaf: Any, kinds: tuple[type, ...] = ()) -> Any:
    return tf.convert_to_tensor(leaf) if isinstance(leaf, (np.ndarray, np.generic, *kinds)) else leaf
