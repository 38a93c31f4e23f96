"""The order in which a backward pass computes.

From the gradient dY of a layer's output come the gradient of its weights, dW, which nothing waits for, and that of its
input, dX, for which all layers before wait. TensorFlow takes both as ready and leaves to its executor which comes
first: with a single thread that is dX, each time, so that every dW is computed at the very end. By then all activations
and all dY are still in memory, and none of the gradients could travel while the pass went on. So what else uses dY is
made to wait for dW.
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

    `start`: what the backward pass began with.
    """
    ends = _ends(gradients, start.op)
    # Operations are numbered as they are made, so that all they hang on has lower numbers. An end could be at once
    # after the newest tensor that it hangs on; edges that lead from there to higher numbers cannot close a circle.
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
    """The operations after `start` that lead to one gradient, or to several that travel as one, and to nothing else; by
    number.
    """
    last = [values_of(gradient).op for gradient in gradients]
    leads_to = {operation_number(operation): operation_number(_seen(operation)) for operation in last}
    waiting = {operation_number(operation): operation for operation in last}
    order = [-made for made in waiting]
    heapq.heapify(order)
    ends: dict[int, tf.Operation] = {}
    while order:  # from the newest: who uses an operation's results is newer than it
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
    """The operation whose output `operation` only views, through any number of views."""
    while operation.type in _VIEWS and len(operation.inputs):
        operation = operation.inputs[-1 if operation.type == "Split" else 0].op
    return operation


def age(gradient: tf.Tensor) -> int:
    """Orders gradients as the backward pass makes them."""
    return operation_number(gradient.op)


def made_after(gradient: tf.Tensor, tensor: tf.Tensor, newest: int) -> None:
    """Makes a gradient wait for `tensor`, which depends on gradients up to number `newest`, unless all of the
    gradient's inputs are older. To be called while a graph is traced."""
    made = _seen(gradient.op)
    if (
        made.graph is tensor.graph
        and max((operation_number(_seen(source.op)) for source in made.inputs), default=0) > newest
    ):
        compute_after(made, tensor.op)
