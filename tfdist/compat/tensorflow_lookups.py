"""TensorFlow operations that take row numbers (indices), wherever they are called from: by models, Keras, or
TensorFlow.

On a CPU each raises an error for a number that is out of range. XLA silently uses another row, or leaves out what
should go there; a GPU silently uses zeros, or leaves it out as well. (x[i] and tf.slice raise errors there, too, but
not in a loop that XLA compiles.)
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import function_context
from tensorflow.python.ops import gen_array_ops, gen_math_ops, gen_resource_variable_ops, handle_data_util

# The arguments of an operation, by name.
Given = dict[str, Any]
# Bool, to be broadcast to the result of an operation: true where that comes from numbers in range; None: everywhere.
Mask = tf.Tensor | None
# (whether the operation looks rows up, rather than writes them; its result; a function that makes the mask) -> the
# result to return in its place
Check = Callable[[bool, tf.Tensor, Callable[[], Mask]], tf.Tensor]


@functools.cache
def watch(check: Check, is_watching: Callable[[], bool]) -> None:
    """Lets `check` see the results of these operations, from now on and in all threads. While it watches, tf.functions
    do not use traces from when it did not. Relies on the functions of `tensorflow.python.ops.gen_*_ops`, through which
    TensorFlow makes its operations, and on `make_function_context` of its traces; without them lookups of missing rows
    go unnoticed under XLA and on GPUs."""

    def watched(original: Callable, signature: inspect.Signature, looks_up: bool, mask: Callable) -> Callable:
        @functools.wraps(original)
        @tf.autograph.experimental.do_not_convert
        def operation(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            if not is_watching():
                return found
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            if given.arguments.get("bad_indices_policy") == "IGNORE":
                return found
            return check(looks_up, found, lambda: mask(given.arguments))

        return operation

    replacements: list[tuple[Callable, Callable]] = []
    for module, masks in _MASKS.items():
        for name, mask in masks.items():
            function = getattr(module, name)
            raw = getattr(module, "".join(part.capitalize() for part in name.split("_")))  # of tf.raw_ops
            signature, looks_up = inspect.signature(function), mask in (_of_rows, _of_places)
            replacements += [(original, watched(original, signature, looks_up, mask)) for original in (function, raw)]
    _replace_everywhere(replacements)
    traced_for = function_context.make_function_context

    def make_function_context(scope_type: Any = None) -> Any:
        made = traced_for(scope_type)
        return made._replace(context=(made.context, "watched")) if is_watching() else made

    function_context.make_function_context = make_function_context


def _replace_everywhere(replacements: Sequence[tuple[Callable, Callable]]) -> None:
    """Replaces the first of each pair by the second, also under other names in modules, such as tf.scatter_nd."""
    by_original = {id(original): by for original, by in replacements}  # so that one pass over 4,000 modules is enough
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None) or {}
        for name, held in list(names.items()):
            if id(held) in by_original:
                names[name] = by_original[id(held)]


# -- which of the numbers are in range ---------------------------------------------------------------------------------


def _static(value: Any) -> np.ndarray | None:
    """The value, if it is known during tracing. (The value of an eager tensor may still have to come from a GPU.)"""
    known = None if isinstance(value, tf.Tensor) and hasattr(value, "numpy") else tf.get_static_value(value)
    return None if known is None else np.asarray(known)


def _inside(numbers: Any, limit: Any) -> Mask:
    """Whether each number is in [0, limit), element by element; None if all are known to be."""
    known, end = _static(numbers), _static(limit)
    if known is not None and end is not None and bool(np.all((known >= 0) & (known < end))):
        return None  # for example dims taken from a shape
    numbers = tf.cast(numbers, tf.int64)  # GPUs do not compare int32
    return (numbers >= 0) & (numbers < tf.cast(limit, tf.int64))


def _all(mask: Mask) -> Mask:
    return None if mask is None else tf.reduce_all(mask)


def _shape(given: Given) -> tuple[tf.TensorShape, Any]:
    """Returns (the shape as far as it is known statically, the full shape) of the table of a lookup."""
    if "resource" not in given:
        table = tf.convert_to_tensor(given["params" if "params" in given else "tensor"])
        return table.shape, table.shape.as_list() if table.shape.is_fully_defined() else tf.shape(table)
    handle = given["resource"]
    data = getattr(handle, "_handle_data", None) or handle_data_util.get_resource_handle_data(handle)
    static = tf.TensorShape(data.shape_and_type[0].shape)
    if static.is_fully_defined():
        return static, static.as_list()
    return static, gen_resource_variable_ops.variable_shape(handle)


def _of_rows(given: Given) -> Mask:
    """The mask of gather, whose numbers [batch_dims..., looked up...] are places on one axis."""
    static, shape = _shape(given)
    indices = tf.convert_to_tensor(given["indices"])
    axis = _static(given.get("axis", given.get("batch_dims", 0)))
    if axis is None or static.rank is None or indices.shape.rank is None:
        return _all(_inside(indices, tf.gather(shape, given["axis"] if axis is None else axis)))
    axis = int(axis) % static.rank
    batch_dims = given.get("batch_dims", 0)
    batch_dims += indices.shape.rank if batch_dims < 0 else 0
    mask = _inside(indices, shape[axis])
    if mask is None:
        return None
    for _ in range(axis - batch_dims):
        mask = tf.expand_dims(mask, batch_dims)
    for _ in range(static.rank - axis - 1):
        mask = tf.expand_dims(mask, -1)
    return mask


def _of_places(given: Given) -> Mask:
    """The mask of gather_nd, whose numbers [..., K] are places on the first K axes."""
    static, shape = _shape(given)
    indices = tf.convert_to_tensor(given["indices"])
    depth = _depth(indices)
    if not isinstance(depth, int) or static.rank is None:
        return _all(_inside(indices, shape[:depth]))
    mask = _inside(indices, shape[:depth])
    if mask is None:
        return None
    mask = tf.reduce_all(mask, -1)
    for _ in range(static.rank - depth):
        mask = tf.expand_dims(mask, -1)
    return mask


def _depth(indices: tf.Tensor) -> int | tf.Tensor:
    """How many numbers make a place."""
    known = None if indices.shape.rank is None else indices.shape[-1]
    return tf.shape(indices)[-1] if known is None else known


def _of_targets(given: Given) -> Mask:
    """The mask of a scatter into `tensor`, or into zeros of `shape`: for the whole result, as values that are left out
    have no place."""
    indices = tf.convert_to_tensor(given["indices"])
    shape = tf.convert_to_tensor(given["shape"]) if "shape" in given else _shape(given)[1]
    return _all(_inside(indices, shape[: _depth(indices)]))


def _of_segments(given: Given) -> Mask:
    """The mask of sums and the like over segments. Negative numbers count as in range: TensorFlow leaves them out, as
    documented."""
    limit = given["num_segments"]
    return _all(_inside(tf.maximum(given["segment_ids"], 0), limit))


_SEGMENTS = ("unsorted_segment_sum", "unsorted_segment_max", "unsorted_segment_min", "unsorted_segment_prod")
_SCATTERS = ("scatter_nd", *(f"tensor_scatter_{how}" for how in ("update", "add", "sub", "max", "min")))
_MASKS: dict[Any, dict[str, Callable[[Given], Mask]]] = {
    gen_array_ops: {
        "gather": _of_rows,
        "gather_v2": _of_rows,
        "gather_nd": _of_places,
        **dict.fromkeys(_SCATTERS, _of_targets),
    },
    gen_math_ops: dict.fromkeys(_SEGMENTS, _of_segments),
    gen_resource_variable_ops: {"resource_gather": _of_rows, "resource_gather_nd": _of_places},
}
