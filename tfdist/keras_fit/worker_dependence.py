"""Tells which tensors of a graph differ between workers: those made of the own rows of the batch, of their count, or of
random numbers of the worker. What was gathered from all workers, and what is drawn outside of the forward pass over own
rows, is the same on all.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

# Of variables: the same on all workers.
_READS = ("VarHandleOp", "ReadVariableOp", "ResourceGather", "ResourceGatherNd")
_BY_ELEMENT = ("Identity", "Cast", "Placeholder", "SelectV2", "AddV2", "BiasAdd", "Mul", "Sub", "Relu", "Tanh")
_OF_ZEROS = ("ZerosLike", "Fill", "Cast", "Sum")
# graph -> names of operations -> whether their results differ between workers
_marked: weakref.WeakKeyDictionary[tf.Graph, dict[str, bool]] = weakref.WeakKeyDictionary()


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
def stateful_operations_marked() -> Iterator[None]:
    """Context manager for a forward pass over own rows: stateful operations inside differ between workers."""
    if tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    for op in graph.get_operations()[before:]:
        if op.op_def.is_stateful and op.type not in _READS:
            _marked.setdefault(graph, {}).setdefault(op.name, True)


def is_worker_dependent(tensor: tf.Tensor, if_untold: bool = True) -> bool:
    """Whether the values or the shape of a tensor in a graph differ between workers. if_untold: the answer if it
    depends on the size of a dim of which nobody can tell whether it holds rows."""
    waiting, seen = [tensor], set()
    while waiting:
        tensor = waiting.pop()
        op = tensor.op
        if tensor.ref() in seen or _is_length_of_a_row(tensor, if_untold) or _are_zeros_alike(tensor):
            continue
        seen.add(tensor.ref())
        differs = _marked.get(op.graph, {}).get(op.name)
        if differs:
            return True
        if differs is None:
            waiting += made_of(op)
    return False


def worker_dependent_inputs(graph: tf.Graph) -> Iterator[tuple[int, tf.Operation, tf.Tensor]]:
    """Yields, for each operation that takes a tensor which differs between workers, its place in the graph, the
    operation, and the tensor."""
    marked = {graph.get_operation_by_name(name): differs for name, differs in _marked.get(graph, {}).items()}
    differing = set[Any]()  # references of tensors
    for place, op in enumerate(graph.get_operations() if any(marked.values()) else ()):
        taken = [each for each in op.inputs if each.ref() in differing] if differing else []
        if taken := [each for each in taken if not _are_zeros_alike(each)]:
            yield place, op, taken[0]
        if marked.get(op, bool(taken)):
            differing |= {each.ref() for each in op.outputs if op in marked or not _is_length_of_a_row(each, True)}


def made_of(op: tf.Operation) -> list[tf.Tensor]:
    """The tensors of which an operation makes its results, as far as graphs tell. What a branch takes from the graph
    outside is a placeholder in it."""
    if op.type != "Placeholder" or op.outputs[0].dtype == tf.resource:
        return list(op.inputs)
    captures = getattr(op.graph, "captures", ())
    return [outside for outside, inside in captures if inside is op.outputs[0] and hasattr(outside, "graph")]


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


def _is_length_of_a_row(tensor: tf.Tensor, if_untold: bool) -> bool:
    """Whether the tensor holds sizes of dims, taken from tf.shape(x), that hold no rows: they are equal on all workers.
    if_untold: see is_worker_dependent."""
    held = {_holds_rows(*dim) for dim in _dims_asked(tensor)}
    return bool(held) and True not in held and not (None in held and if_untold)


def _dims_asked(sizes: tf.Tensor) -> list[tuple[tf.Tensor, int]]:
    """The dims of a tensor of which these are the sizes, taken from its shape; empty if they are something else."""
    op = sizes.op
    if op.type not in ("StridedSlice", "GatherV2", "Unpack") or op.inputs[0].op.type != "Shape":
        return []
    if op.type == "Unpack":
        return [(op.inputs[0].op.inputs[0], sizes.value_index)]
    tensor, given = op.inputs[0].op.inputs[0], [tf.get_static_value(each) for each in op.inputs[1:]]
    if tensor.shape.rank is None or any(each is None for each in given):
        return []
    places = given[0]
    if op.type == "StridedSlice":
        if places.shape != (1,):  # as with an ellipsis
            return []
        begin, end, step = (int(each[0]) for each in given)
        part = slice(None if op.get_attr("begin_mask") else begin, None if op.get_attr("end_mask") else end, step)
        places = begin if op.get_attr("shrink_axis_mask") else part
    return [(tensor, int(dim)) for dim in np.arange(tensor.shape.rank)[places].ravel()]


def _dims_of_sizes(numbers: tf.Tensor) -> list[tuple[tf.Tensor, int] | None]:
    """For each of some numbers, the dim of which it is the size; None for other numbers."""
    op = numbers.op
    if op.type in ("Pack", "ConcatV2"):
        parts = op.inputs if op.type == "Pack" else op.inputs[:-1]
        return [dim for part in parts for dim in _dims_of_sizes(part)]
    return [*_dims_asked(numbers)] or [None] * (numbers.shape.num_elements() or 0)


def _holds_rows(tensor: tf.Tensor, dim: int) -> bool | None:
    """Whether a dim of a tensor that is made of own rows holds rows; None if nobody can tell.

    Layers return rows in their first dim; a transposition moves them. But what an operation that is not followed here
    has made, and is then transposed, may have been time-major before.
    """
    waiting, seen, found = [(tensor, dim)], set(), set[bool | None]()
    while waiting:
        made, place = waiting.pop()
        if (made.ref(), place) in seen:
            continue
        seen.add((made.ref(), place))
        if _marked.get(made.op.graph, {}).get(made.op.name):
            found.add(place == 0)
        elif same := _same_dims(made, place):
            waiting += same
        elif _is_of_steps(made.op):
            found.add(place == 1)
        elif place == dim:
            found.add(dim == 0)
        else:
            found.add(None if 0 in (place, dim) else False)
    # These dims have one size, as those of tensors that are added up: one answer is enough.
    return True in found or (False if False in found else None)


def _same_dims(tensor: tf.Tensor, dim: int) -> list[tuple[tf.Tensor, int]]:
    """The dims of other tensors of which this one is made, so that it has their size; empty if that is unknown."""
    op = tensor.op
    if op.type == "Transpose":
        permutation = tf.get_static_value(op.inputs[1])
        return [] if permutation is None else [(op.inputs[0], int(permutation[dim]))]
    if op.type == "Reshape":
        sizes = _dims_of_sizes(op.inputs[1])
        return [size for size in sizes[dim : dim + 1] if size and len(sizes) == tensor.shape.rank]
    if op.type in ("GatherV2", "ResourceGather"):
        in_front = not op.get_attr("batch_dims") and (len(op.inputs) == 2 or tf.get_static_value(op.inputs[2]) == 0)
        return [(op.inputs[1], dim)] if in_front and dim < (op.inputs[1].shape.rank or 0) else []
    alike = [each for each in made_of(op) if op.type in _BY_ELEMENT and each.shape.rank == tensor.shape.rank]
    wide = [each for each in alike if each.shape[dim] != 1]  # the others may be repeated along it
    return [(each, dim) for each in wide or alike]


def _is_of_steps(op: tf.Operation) -> bool:
    """Whether the operation puts steps one after the other that each have rows in their first dim, as an RNN does."""
    if op.type != "TensorListStack":
        return op.type == "Pack" and op.get_attr("axis") == 0
    loop, place = op.inputs[0].op, op.inputs[0].value_index
    made = loop.inputs[place].op if loop.type in ("While", "StatelessWhile") else loop
    if made.type != "TensorListReserve":
        return False
    [count] = _dims_of_sizes(made.inputs[1]) or [None]
    # Otherwise each step may be one row, as in tf.map_fn.
    return count[0].op.type == "Transpose" if count else (tf.get_static_value(made.inputs[1]) or 0) > 0
