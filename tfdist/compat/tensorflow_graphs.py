"""Operations in a graph: their order, and edges that are added after they are made (TensorFlow 2.21)."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils, op_def_registry
from tensorflow.python.framework.ops import gradient_registry
from tensorflow.python.ops import array_ops

from tfdist.compat.temporary_attributes import attribute_replaced

_DRAWING = re.compile(
    "Random|Rng|Stateful(Uniform|Standard)|Multinomial|TruncatedNormal|CandidateSampler|SampleDistorted"
)
_SETTING = re.compile("Assign|Resource(Scatter|Apply|SparseApply)|LookupTable(Insert|Remove)")


def draws(kind: str) -> bool:
    """Whether operations of this type draw random numbers."""
    return bool(_DRAWING.search(kind))


def draws_anew(kind: str) -> bool:
    """Whether operations of this type draw other numbers each time they run; others take their seeds as an input."""
    return draws(kind) and is_stateful(kind)


def is_stateful(kind: str) -> bool:
    """Whether operations of this type keep state from one call to the next; also true if TensorFlow does not know it.
    Relies on tensorflow.python's `op_def_registry`."""
    definition = op_def_registry.get(kind)
    return definition is None or definition.is_stateful


def sets_state(kind: str) -> bool:
    """Whether operations of this type set a variable or a table."""
    return bool(_SETTING.match(kind))


def is_seen_from(tensor: tf.Tensor, graph: tf.Graph) -> bool:
    """Whether a graph can use a tensor: one of its own, or of a graph around it, as a loop's or a condition's has."""
    return is_inside(graph, tensor.graph)


def is_inside(graph: tf.Graph, other: tf.Graph) -> bool:
    """Whether a graph is another one, or of a branch, loop or function in it. Relies on `FuncGraph.outer_graph`;
    without it dropped tokens are not counted in some evaluations, and tfdist.fit does not see in branches what uses the
    rows of one worker."""
    around: Any = graph
    while around is not None and around is not other:
        around = getattr(around, "outer_graph", None)
    return around is not None


def operation_number(operation: tf.Operation) -> int:
    """The number of an operation; those of a graph are numbered in the order in which they are made. Relies on
    `Operation._id`; without it the order in which gradients are computed is left to TensorFlow, and fewer of them are
    sent while the backward pass is running.
    """
    return operation._id


def nodes_of(graph: Any) -> list[Any]:
    """The nodes of a GraphDef, and those of the functions in its library."""
    return [*graph.node, *(node for called in graph.library.function for node in called.node_def)]


def kinds_of_operations(graph: tf.Graph) -> tuple[set[str], set[str]]:
    """Returns (the types of all operations of a graph and of the functions that it calls, those of them in loops)."""
    definition = graph.as_graph_def()
    return _kinds(definition.node, definition.library.function)


def kinds_called_by(operation: tf.Operation) -> set[str]:
    """The types of the operations in the functions that an operation calls (as a loop does); empty if it calls none."""
    if not _called(operation.node_def):
        return set()
    bodies = {
        function.signature.name: function.node_def for function in operation.graph.as_graph_def().library.function
    }
    return {node.op for name in _reached([operation.node_def], bodies) for node in bodies[name]}


def kinds_made_here(graph: tf.Graph, since: int) -> set[str]:
    """The types of the operations that this replica has made after the graph had `since`, and of the operations in
    functions that they call."""
    nodes = [operation.node_def for operation in _made_here(graph, since)]
    calls = any(_called(node) for node in nodes)
    return _kinds(nodes, graph.as_graph_def().library.function if calls else ())[0]


def taken_from_before(graph: tf.Graph, since: int) -> list[tf.Tensor]:
    """The tensors of the first `since` operations that later ones of this replica take."""
    older = {id(operation) for operation in graph.get_operations()[:since]}
    taken = {id(tensor): tensor for operation in _made_here(graph, since) for tensor in operation.inputs}
    return [tensor for tensor in taken.values() if id(tensor.op) in older]


def written_variables(function: Any) -> list[tf.Variable]:
    """The variables that a traced function may write: those whose handles something but a read takes."""
    reads = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape")
    written = {
        id(outside)
        for outside, inside in function.graph.captures
        if inside.dtype == tf.resource and any(op.type not in reads for op in inside.consumers())
    }
    return [variable for variable in function.graph.variables if id(variable.handle) in written]


def is_made_of_variables(tensor: tf.Tensor) -> bool:
    """Whether a gradient with respect to some floating variable may flow through a tensor of a graph."""

    def carries(one: tf.Tensor) -> bool:  # lists of tensors, as in loops, are variants
        return has_gradient(one) or one.dtype == tf.variant

    return carries(tensor) and _is_made_of(tensor, _reads_a_variable, carries, ("StopGradient",))


def is_made_of_values(tensor: tf.Tensor) -> bool:
    """Whether a tensor of a function's graph is computed from what the function is given, from variables or from random
    numbers, and not only from constants (also those outside of it) and shapes. Relies on `FuncGraph.captures`."""
    constants = {id(inside.op) for _, inside in tensor.graph.captures}

    def is_a_value(one: tf.Tensor) -> bool:
        return one.dtype != tf.resource

    def is_given(operation: tf.Operation) -> bool:
        is_argument = operation.type == "Placeholder" and id(operation) not in constants
        return is_argument or _reads_a_variable(operation) or draws(operation.type)

    return is_a_value(tensor) and _is_made_of(tensor, is_given, is_a_value, ("Shape", "ShapeN", "Size", "Rank"))


def _reads_a_variable(operation: tf.Operation) -> bool:
    return operation.type in ("ReadVariableOp", "ResourceGather") and has_gradient(operation.outputs[0])


def _is_made_of(
    tensor: tf.Tensor,
    is_source: Callable[[tf.Operation], bool],
    follows: Callable[[tf.Tensor], bool],
    ends: Sequence[str],
) -> bool:
    """Whether the operations before a tensor lead to a source. follows: to which inputs; ends: kinds of operations at
    which a way ends."""

    def before(operation: tf.Operation) -> list[tf.Operation]:
        return [] if operation.type in ends else [each.op for each in operation.inputs if follows(each)]

    return any(map(is_source, operations_behind([tensor.op], before)))


def inputs_of(operation: tf.Operation) -> list[tf.Operation]:
    """The operations whose results an operation takes."""
    return [tensor.op for tensor in operation.inputs]


def operations_behind(
    operations: Iterable[tf.Operation], before: Callable[[tf.Operation], Iterable[tf.Operation]] = inputs_of
) -> Iterator[tf.Operation]:
    """Yields these operations, those `before` them, and so on, each once."""
    waiting, seen = list(operations), set()
    while waiting:
        if (operation := waiting.pop()) not in seen:
            seen.add(operation)
            yield operation
            waiting += before(operation)


def has_gradient(tensor: tf.Tensor) -> bool:
    """Whether a gradient with respect to tensors of this type is defined."""
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def _made_here(graph: tf.Graph, since: int) -> list[tf.Operation]:
    """The operations that this replica has made after the graph had `since`. Relies on the name scope that
    MirroredStrategy gives each replica; replicas are traced in turns, so without it operations that another replica
    makes in between are attributed to this one."""
    mine = _replicas(f"{tf.get_current_name_scope()}/")
    return [operation for operation in graph.get_operations()[since:] if _replicas(operation.name) == mine]


def _replicas(name: str) -> list[str]:
    return re.findall(r"(?:^|/)replica_(\d+)/", name)


def _kinds(nodes: Any, functions: Any) -> tuple[set[str], set[str]]:
    bodies = {function.signature.name: function.node_def for function in functions}
    every = [*nodes, *(node for name in _reached(nodes, bodies) for node in bodies[name])]
    waiting = [name for node in every if node.op in ("While", "StatelessWhile") for name in _called(node)]
    return {node.op for node in every}, {node.op for name in _closed(waiting, bodies) for node in bodies[name]}


def _reached(nodes: Any, bodies: dict[str, Any]) -> list[str]:
    return _closed([name for node in nodes for name in _called(node)], bodies)


def _closed(waiting: list[str], bodies: dict[str, Any]) -> list[str]:
    """The names of these functions and of all functions that they call."""
    found: dict[str, None] = {}
    while waiting:
        if (name := waiting.pop()) in bodies and name not in found:
            found[name] = None
            waiting += [called for node in bodies[name] for called in _called(node)]
    return list(found)


def _called(node: Any) -> list[str]:
    """The names of the functions that a node calls."""
    values = node.attr.values()
    return [function.name for value in values for function in (value.func, *value.list.func) if function.name]


def compute_after(operation: tf.Operation, first: tf.Operation) -> None:
    """Makes `operation` wait for `first`, of the same graph. Relies on `Operation._add_control_input`."""
    operation._add_control_input(first)


def function_graph(name: str) -> tf.Graph:
    """Returns a graph like that of a tf.function, in which code runs without being traced by one: variables are made
    outside of it, and values outside of it can be used. Relies on `tf.__internal__.FuncGraph`.
    """
    return tf.__internal__.FuncGraph(name)


@contextlib.contextmanager
def filled_always() -> Iterator[None]:
    """Context manager in which `tf.zeros`, `tf.ones` and the like always make an operation that fills a shape. Usually
    they make a constant if it has fewer than 1,000 elements, so that graphs differ by this number. Relies on
    `array_ops._constant_if_small`; without it models that use them are not proved, but tried.
    """
    with attribute_replaced(array_ops, "_constant_if_small", lambda *args, **kwargs: None):
        yield


class CalledGraph(NamedTuple):
    """The graph of a function that an operation calls. inputs: its placeholders, one for each input of the operation.
    outputs: its tensors, one for each output."""

    graph: tf.Graph
    inputs: Sequence[tf.Tensor]
    outputs: Sequence[tf.Tensor]


def graph_called_by(operation: tf.Operation) -> CalledGraph | None:
    """The graph that an operation calls; None if it calls none. Relies on `Graph._get_function`; without it operations
    that call a function (grouped convolutions) are not proved, but tried.
    """
    if operation.type not in ("PartitionedCall", "StatefulPartitionedCall"):
        return None
    graph = operation.graph._get_function(operation.get_attr("f").name).graph
    return CalledGraph(graph, graph.inputs, graph.outputs)


def captured_by(graph: tf.Graph) -> list[Any]:
    """The tensors that a `function_graph` uses from outside, in order of first use. Relies on `FuncGraph.captures`."""
    return [outside for outside, _ in graph.captures]


def written_from_outside(graph: tf.Graph) -> list[tf.Tensor]:
    """The handles of resources outside the graph of a tf.function that the graph, or a function that it calls, may
    change: exact for variables; of other resources, also those that it only reads. Relies on `FuncGraph.captures`, and
    on `auto_control_deps_utils`; without them state that no snapshot holds is lost silently.
    """
    read_only = auto_control_deps_utils.get_read_only_resource_input_indices_graph(graph)
    unchanged = {id(graph.inputs[index]) for index in read_only}
    return [
        outside for outside, inside in graph.captures if inside.dtype == tf.resource and id(inside) not in unchanged
    ]


def makers_of_gradients(graph: tf.Graph) -> set[str]:
    """The modules of the functions that compute gradients of operations in place of TensorFlow's own (as under
    tf.custom_gradient); "" for an unknown module.

    Relies on the attribute `_gradient_op_type`, on the registry of gradients, and on the names of the variables that
    tf.custom_gradient encloses; without these all modules are unknown.
    """
    found: set[str] = set()
    for operation in graph.get_operations():
        attributes = operation.node_def.attr
        if "_gradient_op_type" in attributes:
            found.add(_module_of(attributes["_gradient_op_type"].s.decode()))
    return found


def _module_of(name: str) -> str:
    try:
        function = gradient_registry.lookup(name)
        for enclosed in ("tape_grad_fn", "grad_fn"):
            function = inspect.getclosurevars(function).nonlocals[enclosed]
        return function.__module__
    except (AttributeError, KeyError, LookupError, TypeError):
        return ""
