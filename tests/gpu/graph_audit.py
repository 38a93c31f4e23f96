"""Checks without a GPU whether a traced function would run on one, in the kernel table of this TensorFlow build.

TensorFlow registers the kernels of all devices in one table, in the wheel for CPUs, too. A function is traced within
`tf.device("GPU:0")`; every operation of its graph, and of the graphs that it calls, must then
  - have a GPU kernel for its dtypes, or be pinned to the CPU, or be listed in ON_THE_HOST with the reason;
  - not sum int32 over workers, which TensorFlow refuses on GPUs although it has a kernel (BaseCollectiveExecutor);
  - not call Python, unless it is pinned to the CPU;
  - take nothing large through an argument that its kernel needs in the host's memory;
  - make nothing large in float64, in which GPUs are up to 64 times slower;
  - if it is pinned to the CPU, neither take nor return anything large.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import tensorflow as tf
from tensorflow.python.framework import kernels, op_def_registry

LARGE_BYTES = 64 * 2**10
_PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
_CALLS = ("StatefulPartitionedCall", "PartitionedCall", "While", "StatelessWhile")
_SUMS_OVER_WORKERS = ("CollectiveReduce", "CollectiveReduceV2", "CollectiveReduceV3", "CollectiveReduceScatterV2")
_TRIVIAL = ("NoOp", "Const", "Placeholder", "Identity")

# Operations without a GPU kernel that no device runs, or that cost a GPU nothing.
ON_THE_HOST = {
    "_Arg": "an argument of a function",
    "_Retval": "a result of a function",
}


@dataclass(frozen=True)
class Finding:
    """What is wrong with one operation."""

    rule: str  # "no kernel", "Python", "large on the host", "large in float64", "large on the CPU"
    op: str  # its type
    name: str
    detail: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.op} ({self.name}): {self.detail}"


@dataclass(frozen=True)
class Audit:
    """The result for one function."""

    operations: int
    findings: tuple[Finding, ...]
    on_host: tuple[str, ...]  # types of operations that are pinned to the CPU, each once

    @classmethod
    def from_dict(cls, found: dict) -> Audit:
        """The inverse of dataclasses.asdict, by way of JSON."""
        findings = tuple(Finding(**finding) for finding in found["findings"])
        return cls(found["operations"], findings, tuple(found["on_host"]))


def audit(function: tf.types.experimental.ConcreteFunction, host: str = "CPU:0") -> Audit:
    """Checks every operation of a traced function. host: the device that stands for the host in it."""
    graph = function.graph
    operations = [operation for each in (graph, *_called(graph)) for operation in each.get_operations()]
    findings = [finding for operation in operations for finding in _findings(operation, host)]
    pinned = sorted({each.type for each in operations if _pinned(each, host) and each.type not in _TRIVIAL})
    return Audit(len(operations), tuple(findings), tuple(pinned))


def _called(graph: tf.Graph) -> Iterator[tf.Graph]:
    """Yields the graphs of all functions that a graph knows: bodies of loops, branches, gradients."""
    seen: set[str] = set()
    waiting = [graph]
    while waiting:
        for name, definition in _functions(waiting.pop()).items():
            if name not in seen:
                seen.add(name)
                body = definition.graph
                waiting.append(body)
                yield body


def _functions(graph: tf.Graph) -> dict:
    return {str(name): function for name, function in graph._functions.items() if getattr(function, "graph", None)}


def _pinned(operation: tf.Operation, host: str) -> bool:
    return operation.device.upper().endswith(host)


def _findings(operation: tf.Operation, host: str) -> Iterator[Finding]:
    pinned = _pinned(operation, host)
    kernel = None if pinned else _kernel(operation)
    if pinned:
        yield from _large("large on the CPU", operation, (*operation.inputs, *operation.outputs))
        return
    if operation.type in _PYTHON:
        yield Finding("Python", operation.type, operation.name, "its tensors pass through Python")
    elif operation.type in _SUMS_OVER_WORKERS and operation.get_attr("T") == tf.int32:
        yield Finding("no kernel", operation.type, operation.name, "none for GPUs for sums of int32 over workers")
    elif kernel is None and operation.type not in ON_THE_HOST:
        dtypes = ", ".join(sorted({tensor.dtype.base_dtype.name for tensor in (*operation.inputs, *operation.outputs)}))
        yield Finding("no kernel", operation.type, operation.name, f"none for GPUs for {dtypes}")
    if kernel is not None:
        yield from _large("large on the host", operation, _host_tensors(operation, kernel))
    doubles = [tensor for tensor in operation.outputs if tensor.dtype.base_dtype == tf.float64]
    yield from _large("large in float64", operation, doubles)


def _large(rule: str, operation: tf.Operation, tensors: Iterable[tf.Tensor]) -> Iterator[Finding]:
    for tensor in tensors:
        if _bytes(tensor) > LARGE_BYTES:
            yield Finding(rule, operation.type, operation.name, _described(tensor))


def _kernel(operation: tf.Operation):
    """Returns the kernel that a GPU would run; None if there is none."""
    for kernel in _kernels(operation.type):
        if all(_suits(operation, constraint) for constraint in kernel.constraint):
            return kernel
    return None


@functools.cache
def _kernels(kind: str) -> tuple:
    """Returns the kernels for GPUs; one made for GPUs comes before one for any device."""
    found = [
        kernel
        for kernel in kernels.get_registered_kernels_for_op(kind).kernel
        if kernel.device_type in ("GPU", "DEFAULT") and "Xla" not in kernel.label
    ]
    return tuple(sorted(found, key=lambda kernel: (kernel.device_type != "GPU", -kernel.priority)))


def _suits(operation: tf.Operation, constraint) -> bool:
    """Whether the types of an operation are among those of a kernel."""
    allowed = {tf.as_dtype(number) for number in constraint.allowed_values.list.type}
    try:
        given = operation.get_attr(constraint.name)
    except ValueError:
        return True
    given = given if isinstance(given, list) else [given]
    return not allowed or all(tf.as_dtype(each).base_dtype in allowed for each in given)


def _host_tensors(operation: tf.Operation, kernel) -> Iterator[tf.Tensor]:
    """Yields the inputs that the kernel needs in the host's memory, and the outputs that it leaves there."""
    definition = op_def_registry.get(operation.type)
    if definition is None:
        return
    on_host = set(kernel.host_memory_arg)
    for arguments, tensors in (
        (definition.input_arg, list(operation.inputs)),
        (definition.output_arg, list(operation.outputs)),
    ):
        for argument in arguments:
            count = _length(operation, argument)
            mine, tensors = tensors[:count], tensors[count:]
            if argument.name in on_host:
                yield from mine


def _length(operation: tf.Operation, argument) -> int:
    """Returns how many tensors belong to an argument."""
    if argument.number_attr:
        return int(operation.get_attr(argument.number_attr))
    if argument.type_list_attr:
        return len(operation.get_attr(argument.type_list_attr))
    return 1


def _bytes(tensor: tf.Tensor) -> int:
    """Returns the size by the known part of its shape; an unknown dim counts as 1."""
    dtype = tensor.dtype.base_dtype
    if dtype in (tf.resource, tf.variant, tf.string) or tensor.shape.rank is None:
        return 0
    return math.prod(size or 1 for size in tensor.shape.as_list()) * dtype.size


def _described(tensor: tf.Tensor) -> str:
    return f"{tensor.dtype.base_dtype.name} {tensor.shape}, {_bytes(tensor)} bytes"


def waits(function: tf.types.experimental.ConcreteFunction, host: str = "CPU:0") -> list[str]:
    """Returns where the host waits for the GPU, and the GPU then for the host, which has launched nothing meanwhile:
    tensors of any size that are in the GPU's memory and needed in the host's, and host operations that come after a GPU
    operation. Functions that XLA compiles are left out, and branches, which a step need not take."""
    return [line for graph in _taken(function.graph) for line in _waits(graph, host)]


def _taken(graph: tf.Graph) -> Iterator[tf.Graph]:
    """Yields the graph and those that it runs each time: loops and calls."""
    known = _functions(graph)
    yield graph
    for operation in graph.get_operations():
        if operation.type in _CALLS and not _is_compiled(operation):
            called = {
                operation.get_attr(name).name for name in ("f", "body", "cond") if name in operation.node_def.attr
            }
            for name in called & set(known):
                yield from _taken(known[name].graph)


def _is_compiled(operation: tf.Operation) -> bool:
    return "_XlaMustCompile" in operation.node_def.attr and operation.get_attr("_XlaMustCompile")


def _waits(graph: tf.Graph, host: str) -> Iterator[str]:
    for operation in graph.get_operations():
        for tensor in _wanted_on_host(operation, host):
            if not _lies_on_host(tensor, host):
                yield f"{operation.type} ({operation.name}) takes {tensor.name} ({tensor.op.type})"
        for before in operation.control_inputs if _pinned(operation, host) else ():
            if not _pinned(before, host) and before.type != "NoOp":
                yield f"{operation.type} ({operation.name}) comes after {before.name} ({before.type})"


def _wanted_on_host(operation: tf.Operation, host: str) -> list[tf.Tensor]:
    if _pinned(operation, host):
        return list(operation.inputs)
    if operation.type in ("If", "StatelessIf"):
        return [operation.inputs[0]]
    if operation.type in _CALLS:
        return [] if _is_compiled(operation) else [each for each in operation.inputs if each.dtype == tf.int32]
    kernel = _kernel(operation)
    inputs = {id(tensor) for tensor in operation.inputs}
    return [each for each in _host_tensors(operation, kernel) if id(each) in inputs] if kernel else []


def _lies_on_host(tensor: tf.Tensor, host: str) -> bool:
    operation = tensor.op
    if operation.type == "Const" or _pinned(operation, host):
        return True
    if operation.type in (*_CALLS, "Placeholder", "If", "StatelessIf"):
        return tensor.dtype.base_dtype in (tf.int32, tf.resource, tf.variant, tf.string)
    kernel = _kernel(operation)
    return kernel is not None and any(tensor is each for each in _host_tensors(operation, kernel))


def summary(audits: Iterable[tuple[str, Audit]]) -> str:
    """Returns a Markdown table: what was audited, how many operations, what runs on the host, what is wrong."""
    rows = ["| what | operations | on the host | wrong |", "|---|---|---|---|"]
    for name, each in audits:
        wrong = "; ".join(sorted({f"{finding.rule}: {finding.op}" for finding in each.findings})) or "nothing"
        rows.append(f"| {name} | {each.operations} | {', '.join(each.on_host) or 'nothing'} | {wrong} |")
    return "\n".join(rows)
