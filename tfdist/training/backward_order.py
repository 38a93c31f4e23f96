"""The order in which a backward pass computes.

From the gradient dY of a layer's output come the gradient of its weights, dW, for which nothing waits, and the gradient
of its input, dX, for which all earlier layers wait. For TensorFlow both are ready, and its executor decides which comes
first. With a single thread this is always dX, so every dW is computed at the very end. Until then all activations and
all dY stay in memory, and no gradient can travel while the pass continues. So the other users of dY are made to wait
for dW.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import tensorflow as tf

from tfdist.compat.tensorflow_graphs import compute_after, operation_number
from tfdist.training.dtypes import Gradient, values_of

_VIEWS = (
    "Cast",
    "Reshape",
    "Transpose",
    "Identity",
    "Squeeze",
    "ExpandDims",
    "Slice",
    "StridedSlice",
    "Split",
    "SplitV",
)


_ELSEWHERE = -1  # the number of no operation


def weights_first(gradients: Sequence[Gradient], start: tf.Tensor) -> None:
    """Makes TensorFlow compute each of `gradients` as soon as it can. To be called while a graph is traced.

    start: the tensor with which the backward pass begins.
    """
    ends = _ends(gradients, start.op)
    # Operations are numbered in the order of creation, so all their dependencies have lower numbers. An end could run
    # right after the newest tensor on which it depends; edges from there to higher numbers cannot close a cycle.
    place: dict[int, int] = {}
    for made, end in sorted(ends.items()):
        before = [operation_number(source) for source in (*(tensor.op for tensor in end.inputs), *end.control_inputs)]
        place[made] = max((place.get(each, each) for each in before), default=0)
        for upstream in end.inputs:
            if (
                operation_number(start.op) < operation_number(upstream.op) == place[made]
                and operation_number(upstream.op) not in ends
            ):
                for user in upstream.consumers():
                    if operation_number(user) not in ends:
                        compute_after(user, end)


def _ends(gradients: Sequence[Gradient], start: tf.Operation) -> dict[int, tf.Operation]:
    """Returns, by number, the operations after `start` that lead to one gradient, or to several that travel as one
    (they are views of the same tensor), and to nothing else.
    """
    last = [values_of(gradient).op for gradient in gradients]
    leads_to = {operation_number(operation): operation_number(_seen(operation)) for operation in last}
    waiting = {operation_number(operation): operation for operation in last}
    order = [-made for made in waiting]
    heapq.heapify(order)
    ends: dict[int, tf.Operation] = {}
    while order:  # newest first: the users of an operation's results are newer than the operation
        operation = waiting[-heapq.heappop(order)]
        users = [operation_number(user) for output in operation.outputs for user in output.consumers()]
        found = {leads_to[user] if user in ends else _ELSEWHERE for user in users} | (
            {leads_to[operation_number(operation)]} if operation_number(operation) in leads_to else set()
        )
        if operation_number(operation) > operation_number(start) and len(found) == 1 and _ELSEWHERE not in found:
            ends[operation_number(operation)], leads_to[operation_number(operation)] = operation, found.pop()
            for source in (tensor.op for tensor in operation.inputs):
                if operation_number(source) not in waiting:
                    waiting[operation_number(source)] = source
                    heapq.heappush(order, -operation_number(source))
    return ends


def _seen(operation: tf.Operation) -> tf.Operation:
    """Returns the operation whose output `operation` is a view of, through any number of views."""
    while operation.type in _VIEWS and len(operation.inputs):
        operation = operation.inputs[-1 if operation.type == "Split" else 0].op
    return operation


def age(gradient: tf.Tensor) -> int:
    """Returns a sort key that orders gradients as the backward pass creates them."""
    return operation_number(gradient.op)


def made_after(gradient: tf.Tensor, tensor: tf.Tensor, newest: int) -> None:
    """Makes a gradient wait for `tensor`, which depends on gradients up to number `newest`, unless all inputs of the
    gradient are older. To be called while a graph is traced."""
    made = _seen(gradient.op)
    if (
        made.graph is tensor.graph
        and max((operation_number(_seen(source.op)) for source in made.inputs), default=0) > newest
    ):
        compute_after(made, tensor.op)
