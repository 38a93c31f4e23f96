"""Traces a forward pass over own rows once more, to learn how it uses tables, and which sizes in it are the same for
any number of rows.

Which sizes these are (tf.shape, ops.shape of anything in the pass: a length or a number of rows) cannot be read from a
graph in general: layers transpose, stack, sort and loop over what they get. So the pass is run on the numbers of rows
that workers have and that one process would have, and the sizes in these runs are compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.compat.tensorflow_graphs import written_variables
from tfdist.compat.tensorflow_variables import values_kept
from tfdist.control.user_errors import first_line
from tfdist.keras_fit import lookups
from tfdist.keras_fit.batch_inputs import with_other_rows
from tfdist.keras_fit.example_batch import ExampleBatch, taking
from tfdist.keras_fit.size_origin import Origin, origin
from tfdist.keras_fit.worker_dependence import Size, Sizes, mark_worker_dependent, may_be_size, over_own_rows

_MADE_UP = 64  # rows of a batch of which no example is known
_FEW = (3, 1)  # further numbers of rows: n // 16, min(n, 4) and n % 4 may be the same for larger ones


class _Measured(NamedTuple):
    """A number made of sizes, in a run."""

    origin: Origin
    origin_for_any_rows: Origin  # names of other tensors may differ, where Python knows the number of rows
    value: np.ndarray


class PassTraces:
    """
    Args: forward, the pass as a function of its tensors; specs, theirs; cut, for each tensor with rows, whether they
    are the batch's; without_traces, makes a context manager in which the model may be traced and run without a trace
    of it; example, a batch to run it on; workers, how many share the rows; all_rows, theirs together if that is known.
    """

    def __init__(
        self,
        forward: Callable[[list[tf.Tensor]], object],
        specs: list[tf.TensorSpec],
        cut: Sequence[bool],
        without_traces: Callable[[], AbstractContextManager],
        example: ExampleBatch,
        workers: int,
        all_rows: int | None = None,
    ):
        self._forward, self._specs, self._cut = forward, specs, cut
        self._without_traces, self._example = without_traces, example
        self._workers, self._all_rows = workers, all_rows
        self.facts, self.sizes = functools.cache(self._facts), functools.cache(self._sizes)

    def _facts(self, rows: int | None) -> lookups.LookupFacts:
        """How the pass uses tables. rows: another number of own rows."""
        with self._without_traces():
            return lookups.traced(self._forward, self._with_rows(rows) if rows else self._specs, self.sizes)

    def _sizes(self) -> Sizes:
        """Which sizes in the pass are the same for any number of rows; of none if the pass cannot be run."""
        with_dims = [spec for spec in self._specs if spec.shape.rank != 0]
        known = next(spec.shape[0] for spec, cut in zip(with_dims, self._cut, strict=True) if cut)
        try:
            with tf.init_scope(), self._without_traces():
                runs = self._runs_of_known(known) if known else self._runs_of_any()
        except Exception as error:  # noqa: BLE001 - whatever Keras and TensorFlow raise for rows that are not the data's
            return Sizes({}, f"{type(error).__name__}: {first_line(error)[:200]}")
        first, *others = runs
        return Sizes(
            {
                name: Size(found.origin, all(np.array_equal(found.value, other[name].value) for other in others))
                for name, found in first.items()
                if all(
                    name in other and other[name].origin_for_any_rows == found.origin_for_any_rows for other in others
                )
            }
        )

    def _runs_of_any(self) -> list[dict[str, _Measured]]:
        """Runs of a pass that takes any number of rows."""
        all_rows = self._example.rows(1, _MADE_UP)
        numbers = [all_rows, -(-all_rows // self._workers)]
        return self._run(self._specs, [*numbers, *_FEW], at_least=len(numbers))

    def _runs_of_known(self, known: int) -> list[dict[str, _Measured]]:
        """Runs of a pass that is traced anew for each number of rows that any worker has, and for that of all rows."""
        all_rows = self._all_rows or known * self._workers
        numbers = {known: 0, all_rows // self._workers or 1: 0, -(-all_rows // self._workers): 0, all_rows: 0}
        return [run for rows in numbers for run in self._run(self._with_rows(rows), [rows], at_least=1)]

    def _with_rows(self, rows: int) -> list[tf.TensorSpec]:
        return with_other_rows(self._specs, self._cut, rows, unknown=None)

    def _run(self, specs: list[tf.TensorSpec], numbers: Sequence[int], at_least: int) -> list[dict[str, _Measured]]:
        """Runs the pass on such numbers of rows of the example; the first `at_least` must succeed. Then on copies of
        single rows: a number of different values, or the length of the longest row, follows the values.

        Returns for each run the numbers in the pass that are made of sizes, by name."""
        origins: dict[str, tuple[Origin, Origin]] = {}

        def trace(*tensors: tf.Tensor) -> list[tf.Tensor]:
            with over_own_rows(Sizes) as scope:
                self._forward([mark_worker_dependent(tensor) for tensor in tensors])
            found = _made_of_sizes(tf.compat.v1.get_default_graph(), scope)
            origins.clear()
            origins.update(
                {each.name.removeprefix(scope): (origin(each, scope), origin(each, scope, False)) for each in found}
            )
            return found

        function = tf.function(trace, autograph=False).get_concrete_function(*specs)
        given = self._example.like(specs, self._cut)
        take, count = taking(given, self._cut)
        batches = [[row % count for row in range(rows)] for rows in numbers]
        batches += [[row] * numbers[at_least - 1] for row in sorted({0, count // 2, count - 1})]
        runs = []
        with values_kept(written_variables(function)):
            for number, batch in enumerate(batches):
                try:
                    runs.append(function(*take(given, batch)))
                except Exception:
                    if number < at_least:
                        raise
        return [
            {name: _Measured(*how, tensor.numpy()) for (name, how), tensor in zip(origins.items(), found, strict=True)}
            for found in runs
        ]


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
