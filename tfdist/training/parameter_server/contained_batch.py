"""How a worker of a parameter-server run finds its samples: by the chief's function of positions, which it is sent."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfdist.control.exit_codes import ConfigError

_PYTHON_OPS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
_MOST_CONSTANT_BYTES = 2**30  # a function with its constants must stay below 2 GiB, protobuf's limit


class ContainedBatch:
    """A function of positions. The tensors that it captures become constants of the function that uses it, because
    captured tensors would be sent with every call. Raises ConfigError if it needs this process: for Python, tables, or
    more memory than a function can hold.
    """

    def __init__(self, batch: Callable):
        self._function = tf.function(batch, autograph=False).get_concrete_function(tf.TensorSpec([None], tf.int64))
        graph = self._function.graph
        self._definition = graph.as_graph_def()
        operations = {
            node.op
            for nodes in (self._definition.node, *(inner.node_def for inner in self._definition.library.function))
            for node in nodes
        }
        held = [outer for outer, _ in graph.captures]
        size = sum(outer.numpy().nbytes for outer in held if outer.dtype not in (tf.resource, tf.variant))
        holds_tables = any(outer.dtype in (tf.resource, tf.variant) for outer in held)
        what = "runs Python" if operations & set(_PYTHON_OPS) else "contains tables" if holds_tables else ""
        if what:
            raise ConfigError(
                "--strategy=parameter_server sends the data source to the workers as TensorFlow operations, but this"
                f" --source or --augment {what}: return arrays, use a source that holds its data in memory (digits,"
                " text, synthetic), or choose --strategy=multi_worker."
            )
        if size > _MOST_CONSTANT_BYTES:
            raise ConfigError(
                "--strategy=parameter_server sends data in memory to every worker, at most 1 GiB, but this --source"
                f" contains {size / 2**30:.1f} GiB: read it from files (--source=tfrecord), or choose"
                " --strategy=multi_worker."
            )

    def constants(self) -> dict[str, tf.Tensor]:
        """The captured tensors as constants in the graph being traced; call it outside of any loop."""
        return {inner.name: tf.constant(outer.numpy()) for outer, inner in self._function.graph.captures}

    def __call__(self, positions: tf.Tensor, constants: dict[str, tf.Tensor]) -> tuple:
        graph = self._function.graph
        # Brings them into the loop's graph, if inside a loop.
        constants = {name: tf.identity(tensor) for name, tensor in constants.items()}
        outputs = tf.graph_util.import_graph_def(
            self._definition,
            {graph.inputs[0].name: positions, **constants},
            [output.name for output in graph.outputs],
            name="batch",
        )
        for tensor, like in zip(outputs, graph.outputs, strict=True):
            tensor.set_shape(like.shape)
        return tf.nest.pack_sequence_as(self._function.structured_outputs, outputs)
