"""Tells which tensors of a graph differ between workers: those made of the own rows of the batch, of their count, or of
random numbers of the worker. What was gathered from all workers, and what is drawn outside of the forward pass over own
rows, is the same on all.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.keras_fit.same_dims import dims_asked, dims_of_sizes, made_of, same_dims

# Of variables: the same on all workers.
_READS = ("VarHandleOp", "ReadVariableOp", "ResourceGather", "ResourceGatherNd")
_NO_STACK = -1
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
        differs = _differs(op)
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
    held = {_holds_rows(*dim) for dim in dims_asked(tensor)}
    return bool(held) and True not in held and not (None in held and if_untold)


def _holds_rows(tensor: tf.Tensor, dim: int, told: dict | None = None) -> bool | None:
    """Whether a dim of a tensor that is made of own rows holds rows; None if nobody can tell.

    Layers return rows in their first dim; a transposition moves them. But what an operation that is not followed here
    has made, and is then transposed, may have been time-major before. told: the answers of questions before this one.
    """
    told = {} if told is None else told
    key = tensor.ref(), dim
    if key not in told:
        told[key] = None  # of a loop of questions
        found, assumed = _answers(tensor, dim, told)
        found = found or assumed
        # These dims have one size, as those of tensors that are added up: one answer is enough.
        told[key] = True in found or (False if False in found else None)
    return told[key]


def _answers(tensor: tf.Tensor, dim: int, told: dict) -> tuple[set[bool | None], set[bool | None]]:
    """What the operations say of which the tensor is made: those that are followed, and others, of which only an
    assumption is left."""
    waiting, seen = [(tensor, dim)], set()
    found, assumed = set[bool | None](), set[bool | None]()
    while waiting:
        made, place = waiting.pop()
        if (made.ref(), place) in seen:
            continue
        seen.add((made.ref(), place))
        op = made.op
        # A stateful operation is marked whatever it makes; rows come from the iterator of a dataset, too.
        is_own = _differs(op) and (not op.op_def.is_stateful or op.type == "IteratorGetNext")
        if same := [] if is_own else same_dims(made, place):
            waiting += same
        elif is_own:
            found.add(place == 0)
        elif op.type in ("Const", *_READS):
            assumed.add(False)
        elif (rows := _rows_of_stack(op, told)) != _NO_STACK:
            found.add(None if rows is None else place == rows)
        elif place == dim:
            assumed.add(place == 0)
        elif place and same_dims(made, 0) and _holds_rows(made, 0, told):
            found.add(False)  # as a convolution of batches: the rows are in its first dim
        else:
            assumed.add(None)
    return found, assumed


def _differs(op: tf.Operation) -> bool | None:
    """Whether the operation's results are marked as those that differ between workers; None if they are not marked."""
    return _marked.get(op.graph, {}).get(op.name)


def _rows_of_stack(op: tf.Operation, told: dict) -> int | None:
    """The dim that holds rows if the operation puts tensors one after another: 1 for steps that each have all rows (as
    in an RNN), 0 for rows, as in tf.map_fn; None if nobody can tell; _NO_STACK if it does something else."""
    if op.type == "Pack" and op.get_attr("axis") in (0, -1 - (op.inputs[0].shape.rank or 0)):
        count = len(op.inputs)
    elif op.type == "TensorListStack":
        loop, place = op.inputs[0].op, op.inputs[0].value_index
        made = loop.inputs[place].op if loop.type in ("While", "StatelessWhile") else loop
        if made.type != "TensorListReserve":
            return _NO_STACK
        [dim] = dims_of_sizes(made.inputs[1]) or [None]
        if dim:
            holds_rows = _holds_rows(*dim, told)
            is_of_rnn = dim[0].op.type == "Transpose"  # Keras' RNNs take their length from what they have transposed
            return 0 if holds_rows else None if holds_rows is None and not is_of_rnn else 1
        count = int(tf.get_static_value(made.inputs[1]) or 0)
    else:
        return _NO_STACK
    return None if count in _known_rows(op.graph) else 1 if count else _NO_STACK


def _known_rows(graph: tf.Graph | None) -> set[int | None]:
    """The numbers of own rows that are known in the graph and those around it."""
    known = set[int | None]()
    while graph is not None:
        own = [graph.get_operation_by_name(name) for name, differs in _marked.get(graph, {}).items() if differs]
        # Others are marked as they draw, or are seeds.
        own = [op for op in own if op.type == "IteratorGetNext" or not (op.op_def.is_stateful or op.type == "Pack")]
        known |= {each.shape[0] for op in own for each in op.outputs if each.shape.rank}
        graph = getattr(graph, "outer_graph", None)
    return known
