"""Tells which tensors of a graph differ between workers: those made of the own rows of the batch, of their count, or of
random numbers of the worker. What was gathered from all workers, and what is drawn outside of the forward pass over own
rows, is the same on all.

A size of a tensor (tf.shape, ops.shape) may be a number of rows or a length. Which one is known by running the pass on
several numbers of rows (pass_traces.py).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.keras_fit.size_origin import Origin, origin

# Of variables: the same on all workers.
_READS = ("VarHandleOp", "ReadVariableOp", "ResourceGather", "ResourceGatherNd")
_OF_ZEROS = ("ZerosLike", "Fill", "Cast", "Sum")
# graph -> names of operations -> whether their results differ between workers
_marked: weakref.WeakKeyDictionary[tf.Graph, dict[str, bool]] = weakref.WeakKeyDictionary()


class Size(NamedTuple):
    """A number made of sizes. Attributes: origin, see there; is_same, whether it is the same for any number of rows,
    None if nobody can tell."""

    origin: Origin
    is_same: bool | None


class Sizes(NamedTuple):
    """Attributes: by_name, the numbers made of sizes in a pass, by their tensors' names without the scope; failure, why
    the pass could not be run."""

    by_name: Mapping[str, Size] = MappingProxyType({})
    failure: str = ""


class _Pass(NamedTuple):
    """A forward pass over own rows in a graph. Attributes: scope, what the names of its operations begin with; sizes,
    a function that measures sizes in it."""

    scope: str
    sizes: Callable[[], Sizes]


_passes: weakref.WeakKeyDictionary[tf.Graph, list[_Pass]] = weakref.WeakKeyDictionary()


def mark_worker_dependent(tensor: tf.Tensor) -> tf.Tensor:
    """Marks the tensor as one that differs between workers, and returns it."""
    return _mark(tensor, differs=True)


def mark_same_on_all(tensor: tf.Tensor) -> tf.Tensor:
    """Marks the tensor as one that all workers hold, although it is made of those of each, and returns it."""
    return _mark(tensor, differs=False)


def _mark(tensor: tf.Tensor, differs: bool) -> tf.Tensor:
    if isinstance(tensor, tf.Tensor) and hasattr(tensor, "graph"):
        _marked.setdefault(tensor.graph, {})[tensor.op.name] = differs
    return tensor


@contextlib.contextmanager
def over_own_rows(sizes: Callable[[], Sizes]) -> Iterator[str]:
    """Context manager for a forward pass over own rows: stateful operations inside differ between workers. Yields the
    scope of its operations' names. sizes: measures which sizes in the pass are the same for any number of rows."""
    if tf.executing_eagerly():
        yield ""
        return
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    # With a scope of its own the names inside are the same whatever is before it in the graph.
    with tf.name_scope("own_rows") as scope:
        _passes.setdefault(graph, []).append(_Pass(scope, sizes))
        yield scope
    for op in graph.get_operations()[before:]:
        if op.op_def.is_stateful and op.type not in _READS:
            _marked.setdefault(graph, {}).setdefault(op.name, True)


def is_worker_dependent(tensor: tf.Tensor, if_untold: bool = True) -> bool:
    """Whether the values or the shape of a tensor in a graph differ between workers. if_untold: the answer if it
    depends on a size of which nobody can tell whether it follows the number of rows."""
    differs = worker_dependence(tensor)
    return if_untold if differs is None else differs


def worker_dependence(tensor: tf.Tensor) -> bool | None:
    """Whether the values or the shape of a tensor in a graph differ between workers; None if nobody can tell."""
    direct, of_sizes = _made_of_own_rows(tensor, sizes_are_measured=False)
    if not direct and of_sizes:  # measuring takes a trace and two runs
        direct, of_sizes = _made_of_own_rows(tensor, sizes_are_measured=True)
    return True if direct else None if of_sizes else False


def _made_of_own_rows(tensor: tf.Tensor, sizes_are_measured: bool) -> tuple[bool, bool]:
    """Returns (whether a tensor is made of what differs between workers, whether it is made of sizes of such tensors
    that are not known to be the same). If sizes are measured, those that are not the same are among the former."""
    waiting, seen, of_sizes = [(tensor, False)], set[Any](), False
    while waiting:
        tensor, is_size = waiting.pop()
        if (tensor.ref(), is_size) in seen or _are_zeros_alike(tensor):
            continue
        seen.add((tensor.ref(), is_size))
        differs = _differs(tensor.op)
        if sizes_are_measured and differs is None and (size := _measured_size(tensor)):
            if size.is_same is None:
                of_sizes = True
                continue
            differs = not size.is_same
        if differs and not is_size:
            return True, of_sizes
        of_sizes = of_sizes or bool(differs)
        if differs is None:
            waiting += [(each, is_size or tensor.op.type == "Shape") for each in made_of(tensor.op)]
    return False, of_sizes


def why_untold(tensor: tf.Tensor) -> str:
    """Why the passes in a tensor's graph could not be run to measure their sizes; "" if they could."""
    return next((failure for each in _passes.get(tensor.graph, ()) if (failure := each.sizes().failure)), "")


def worker_dependent_inputs(graph: tf.Graph, sizes_are_measured: bool) -> Iterator[tuple[int, tf.Operation, tf.Tensor]]:
    """Yields, for each operation that takes a tensor which differs between workers, its place in the graph, the
    operation, and the tensor. If sizes are not measured, all of them count as different."""
    marked = {graph.get_operation_by_name(name): differs for name, differs in _marked.get(graph, {}).items()}
    differing = set[Any]()  # references of tensors
    for place, op in enumerate(graph.get_operations() if any(marked.values()) else ()):
        taken = [each for each in op.inputs if each.ref() in differing] if differing else []
        if taken := [each for each in taken if not _are_zeros_alike(each)]:
            yield place, op, taken[0]
        if marked.get(op, bool(taken)):
            differing |= {
                each.ref()
                for each in op.outputs
                if op in marked or not (sizes_are_measured and (size := _measured_size(each)) and size.is_same)
            }


def made_of(op: tf.Operation) -> list[tf.Tensor]:
    """The tensors of which an operation makes its results, as far as graphs tell. What a branch takes from the graph
    outside is a placeholder in it."""
    if op.type != "Placeholder" or op.outputs[0].dtype == tf.resource:
        return list(op.inputs)
    captures = getattr(op.graph, "captures", ())
    return [outside for outside, inside in captures if inside is op.outputs[0] and hasattr(outside, "graph")]


def may_be_size(tensor: tf.Tensor) -> bool:
    """Whether the tensor may be one size, or a list of them, or numbers made of them."""
    return tensor.dtype.is_integer and tensor.shape.rank in (0, 1)


def _measured_size(tensor: tf.Tensor) -> Size | None:
    """What is known of a number made of sizes in a pass over own rows; None if the tensor is something else, or was not
    measured."""
    if not may_be_size(tensor):
        return None
    found = (each for each in _passes.get(tensor.graph, ()) if tensor.name.startswith(each.scope))
    if (within := next(found, None)) is None:
        return None
    measured = within.sizes().by_name.get(tensor.name.removeprefix(within.scope))
    return measured if measured and measured.origin == origin(tensor, within.scope) else None


def _are_zeros_alike(tensor: tf.Tensor) -> bool:
    """Whether the tensor holds zeros, equally many on all workers: of a known shape, or added up over rows. Those that
    are made like own rows depend on nothing else; positions may be made of such a sum."""
    op = tensor.op
    if op.type not in _OF_ZEROS or (not tensor.shape.is_fully_defined() and not _is_sum_over_rows(op)):
        return False
    while op.type in ("Cast", "Sum"):
        op = op.inputs[0].op
    return op.type == "ZerosLike" or (op.type == "Fill" and tf.get_static_value(op.inputs[1]) == 0)


def _is_sum_over_rows(op: tf.Operation) -> bool:
    axes = tf.get_static_value(op.inputs[1]) if op.type == "Sum" and op.get_attr("keep_dims") else None
    return axes is not None and 0 in axes.ravel()


def _differs(op: tf.Operation) -> bool | None:
    """Whether the operation's results are marked as those that differ between workers; None if they are not marked."""
    return _marked.get(op.graph, {}).get(op.name)
