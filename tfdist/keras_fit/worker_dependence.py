"""Tells which tensors of a graph differ between workers: those made of the own rows of the batch, of their count, or of
random numbers of the worker. What was gathered from all workers, and what is drawn outside of the forward pass over own
rows, is the same on all.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

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


def is_worker_dependent(tensor: tf.Tensor) -> bool:
    """Whether the values or the shape of a tensor in a graph differ between workers."""
    waiting, seen = [tensor], set()
    while waiting:
        tensor = waiting.pop()
        op = tensor.op
        if (op.graph, op.name) in seen or _is_length_of_a_row(op) or _are_zeros_alike(tensor):
            continue
        seen.add((op.graph, op.name))
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
    differing = set[tf.Operation]()
    for place, op in enumerate(graph.get_operations() if any(marked.values()) else ()):
        taken = [each for each in op.inputs if each.op in differing] if differing else []
        if taken := [each for each in taken if not _are_zeros_alike(each)]:
            yield place, op, taken[0]
        if marked.get(op, bool(taken) and not _is_length_of_a_row(op)):
            differing.add(op)


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


def _is_length_of_a_row(op: tf.Operation) -> bool:
    """Whether the operation is tf.shape(x)[k] of a dim that holds no rows, which is equal on all workers."""
    if op.type != "StridedSlice" or op.inputs[0].op.type != "Shape":
        return False
    tensor, begin = op.inputs[0].op.inputs[0], tf.get_static_value(op.inputs[1])
    if begin is None or begin.shape != (1,) or not tensor.shape.rank:
        return False
    return not _holds_rows(tensor, int(begin[0]) % tensor.shape.rank)


def _holds_rows(tensor: tf.Tensor, dim: int) -> bool:
    """Whether a dim of the tensor is the first one of what it is made of: rows may stand in columns (time-major)."""
    waiting, seen = [(tensor, dim)], set()
    while waiting:
        tensor, dim = waiting.pop()
        if (tensor.ref(), dim) in seen:
            continue
        seen.add((tensor.ref(), dim))
        op, permutation = tensor.op, None
        if op.type == "Transpose":
            permutation = tf.get_static_value(op.inputs[1])
        if permutation is not None:
            waiting.append((op.inputs[0], int(permutation[dim])))
        elif op.type in ("GatherV2", "ResourceGather") and dim < (op.inputs[1].shape.rank or 0):
            waiting.append((op.inputs[1], dim))
        elif made_of(op) and op.type in _BY_ELEMENT:
            alike = [each for each in made_of(op) if each.shape.rank == tensor.shape.rank and each.shape[dim] != 1]
            waiting += [(each, dim) for each in alike]
        elif dim == 0:
            return True
    return False
