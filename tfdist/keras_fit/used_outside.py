"""Refuses a step that uses, outside of the forward pass over own rows, a tensor that was made inside it.

Such a tensor holds the rows of one worker, or numbers made of these alone. Wherever a call may have kept it (in a
module, a class, an optimizer), the graph of the step shows the use: an operation that is neither of the pass nor of a
gradient takes a tensor that differs between workers. kept_tensors.py finds what layers keep as attributes, also without
a graph, and names it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import tensorflow as tf

from tfdist.compat.keras_layers import keep_message
from tfdist.compat.tensorflow_graphs import is_inside
from tfdist.control.exit_codes import ConfigError
from tfdist.keras_fit.kept_tensors import OF_ONE_WORKER
from tfdist.keras_fit.worker_dependence import worker_dependent_inputs

_FOR_GRADIENTS = ("OptionalFromValue", "TensorListPushBack")  # how a branch or a loop keeps what its gradient takes
# graph -> the places, in the order of its operations, at which tfdist began and ended to compute in it
_computed: weakref.WeakKeyDictionary[tf.Graph, list[tuple[int, int]]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def allowed(is_a_pass: bool = False) -> Iterator[None]:
    """Context manager for what may use tensors of own rows: a forward pass with what gathers its results, or else a
    gradient, which also adds operations to the branches through which it goes."""
    if tf.executing_eagerly():
        yield
        return
    if is_a_pass:
        _computed.setdefault(tf.compat.v1.get_default_graph(), [])
    before = {graph: _size(graph) for graph in _computed}
    yield
    for graph, places in _computed.items():
        places.append((before.get(graph, 0), _size(graph)))


def refuse() -> None:
    """Raises ConfigError if an operation of the present graph, or of a branch in it, uses tensors of own rows."""
    if tf.executing_eagerly():
        return
    here = tf.compat.v1.get_default_graph()
    for graph, places in [each for each in _computed.items() if is_inside(each[0], here)]:
        # Measuring sizes takes a trace and runs of the model: only if nothing but a size may be used.
        if any(_uses(graph, places, sizes_are_measured=False)):
            for operation, tensor in _uses(graph, places, sizes_are_measured=True):
                raise keep_message(
                    ConfigError(
                        f"The operation {operation.name} uses {tensor.op.name} outside of the call in which it was"
                        f" computed, which {OF_ONE_WORKER}."
                    )
                )


def _uses(
    graph: tf.Graph, places: list[tuple[int, int]], sizes_are_measured: bool
) -> Iterator[tuple[tf.Operation, tf.Tensor]]:
    """Yields each operation that is not tfdist's and takes a tensor which differs between workers, and that tensor."""
    for number, operation, tensor in worker_dependent_inputs(graph, sizes_are_measured):
        is_ours = any(begin <= number < end for begin, end in places)
        if not is_ours and operation.type not in _FOR_GRADIENTS:
            yield operation, tensor


def _size(graph: tf.Graph) -> int:
    return len(graph.get_operations())
