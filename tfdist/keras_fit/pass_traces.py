"""Traces a forward pass over own rows once more, to learn how it uses tables, and which sizes in it are the same for
any number of rows.

Which sizes these are (tf.shape, ops.shape of anything in the pass: a length or a number of rows) cannot be read from a
graph in general: layers transpose, stack, sort and loop over what they get. So the pass is run on two numbers of rows,
and the sizes in both runs are compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import tensorflow as tf

from tfdist.compat.tensorflow_graphs import written_variables
from tfdist.compat.tensorflow_variables import values_kept
from tfdist.keras_fit import lookups
from tfdist.keras_fit.batch_inputs import with_other_rows
from tfdist.keras_fit.example_batch import ExampleBatch, taking
from tfdist.keras_fit.worker_dependence import Sizes, mark_worker_dependent, may_be_size, over_own_rows

_ROWS = 4  # in the first run, if the pass is traced for any number; the second has twice as many


class PassTraces:
    """
    Args: forward, the pass as a function of its tensors; specs, theirs; cut, for each tensor with rows, whether they
    are the batch's; without_traces, makes a context manager in which the model may be traced and run without a trace
    of it; example, a batch to run it on.
    """

    def __init__(
        self,
        forward: Callable[[list[tf.Tensor]], object],
        specs: list[tf.TensorSpec],
        cut: Sequence[bool],
        without_traces: Callable[[], AbstractContextManager],
        example: ExampleBatch,
    ):
        self._forward, self._specs, self._cut = forward, specs, cut
        self._without_traces, self._example = without_traces, example
        self.facts, self.sizes = functools.cache(self._facts), functools.cache(self._sizes)

    def _facts(self, rows: int | None) -> lookups.LookupFacts:
        """How the pass uses tables. rows: another number of own rows."""
        with self._without_traces():
            return lookups.traced(self._forward, self._with_rows(rows) if rows else self._specs, self.sizes)

    def _sizes(self) -> Sizes:
        """Which sizes in the pass are the same for any number of rows; of none if the pass cannot be run."""
        with_dims = [spec for spec in self._specs if spec.shape.rank != 0]
        known = next(spec.shape[0] for spec, cut in zip(with_dims, self._cut, strict=True) if cut)
        few = known or _ROWS
        # Copies of one row: a number of different values, as of tf.unique, follows the values.
        batches = [list(range(few)), list(range(2 * few)), [0] * 2 * few]
        try:
            with tf.init_scope(), self._without_traces():
                runs = self._run(self._specs, batches[:1] if known else batches)
                runs += self._run(self._with_rows(2 * few), batches[1:]) if known else []
        except Exception:  # noqa: BLE001 - whatever Keras and TensorFlow raise for rows that are not those of the data
            return {}
        names = set.intersection(*map(set, runs))
        return {name: all(np.array_equal(runs[0][name], run[name]) for run in runs[1:]) for name in names}

    def _with_rows(self, rows: int) -> list[tf.TensorSpec]:
        return with_other_rows(self._specs, self._cut, rows, unknown=None)

    def _run(self, specs: list[tf.TensorSpec], batches: list[list[int]]) -> list[dict[str, np.ndarray]]:
        """Runs the pass on rows of the example. Returns for each batch of rows the numbers in the pass that are made of
        sizes, by their names."""
        names: list[str] = []

        def trace(*tensors: tf.Tensor) -> list[tf.Tensor]:
            with over_own_rows(dict) as scope:
                self._forward([mark_worker_dependent(tensor) for tensor in tensors])
            found = _made_of_sizes(tf.compat.v1.get_default_graph(), scope)
            names[:] = [tensor.name.removeprefix(scope) for tensor in found]
            return found

        function = tf.function(trace, autograph=False).get_concrete_function(*specs)
        given = self._example.like(specs, self._cut)
        take, count = taking(given, self._cut)
        with values_kept(written_variables(function)):
            runs = [function(*take(given, [row % count for row in rows])) for rows in batches]
        return [dict(zip(names, [tensor.numpy() for tensor in found], strict=True)) for found in runs]


def _made_of_sizes(graph: tf.Graph, scope: str) -> list[tf.Tensor]:
    """The tensors in this scope that are made of sizes of others, and of constants, alone."""
    found: dict[object, tf.Tensor] = {}
    for op in graph.get_operations():
        of_sizes = [each.ref() in found for each in op.inputs]
        constant = [each.op.type == "Const" for each in op.inputs]
        is_made_of_sizes = any(of_sizes) and all(map(any, zip(of_sizes, constant, strict=True)))
        if op.name.startswith(scope) and (op.type == "Shape" or (is_made_of_sizes and not op.op_def.is_stateful)):
            found |= {each.ref(): each for each in op.outputs if may_be_size(each)}
    return list(found.values())
