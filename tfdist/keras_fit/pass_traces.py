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

from tfdist.compat.tensorflow_functions import IN_PLACE
from tfdist.compat.tensorflow_graphs import written_variables
from tfdist.compat.tensorflow_variables import values_kept
from tfdist.control.user_errors import first_line
from tfdist.keras_fit import lookups
from tfdist.keras_fit.batch_inputs import with_other_rows
from tfdist.keras_fit.example_batch import ExampleBatch, taking
from tfdist.keras_fit.size_origin import Origin, origin
from tfdist.keras_fit.worker_dependence import Size, Sizes, mark_worker_dependent, may_be_size, over_own_rows

_MADE_UP = 64  # rows of a batch of which no example is known
_FEW = (3, 1)  # further numbers of rows: x[:4] has as many for all larger ones
# Operations whose results are some of the numbers that they take.
_SELECT = ("Cast", "ConcatV2", "ExpandDims", "GatherV2", "Identity", "Pack", "Reshape", "Shape", "Slice", "Split")
_SELECT += ("SplitV", "Squeeze", "StridedSlice", "Unpack")


class _Measured(NamedTuple):
    """A number made of sizes, in a run."""

    origin: Origin
    origin_for_any_rows: Origin  # names of other tensors may differ, where Python knows the number of rows
    inputs: list[str]
    selects: bool  # some of the numbers in its inputs
    value: np.ndarray


_Run = dict[str, _Measured]  # the numbers in the pass that are made of sizes, by name


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
                first, *others = self._runs_of_known(known) if known else self._runs_of_any()
        except Exception as error:  # noqa: BLE001 - whatever Keras and TensorFlow raise for rows that are not the data's
            return Sizes({}, f"{type(error).__name__}: {first_line(error)[:200]}")
        are_equal: dict[str, bool] = {}  # in all runs
        calculated = set[str]()  # from what is not: it may be equal by chance (n // 16), unlike a part of a shape
        for name, now in first.items():
            elsewhere = [run.get(name) for run in others]
            if all(each and each.origin_for_any_rows == now.origin_for_any_rows for each in elsewhere):
                are_equal[name] = all(each and np.array_equal(each.value, now.value) for each in elsewhere)
                if any(each in calculated or not (now.selects or are_equal.get(each, True)) for each in now.inputs):
                    calculated.add(name)
        by_chance = {name for name in calculated if are_equal[name]}
        return Sizes(
            {
                name: Size(first[name].origin, None if name in by_chance else is_equal)
                for name, is_equal in are_equal.items()
                if IN_PLACE not in name  # in a step other functions are computed in place, by the same names
            }
        )

    def _runs_of_any(self) -> list[_Run]:
        """Runs of a pass that takes any number of rows."""
        all_rows = self._example.rows(1, _MADE_UP)
        numbers = dict.fromkeys([-(-all_rows // self._workers), all_rows, *_FEW])
        return self._run(self._specs, list(numbers), at_least=2)

    def _runs_of_known(self, known: int) -> list[_Run]:
        """Runs of a pass that is traced anew for each number of rows that any worker has, and for that of all rows."""
        all_rows = self._all_rows or known * self._workers
        others = dict.fromkeys([all_rows // self._workers or 1, -(-all_rows // self._workers), all_rows])
        others.pop(known, None)
        first = self._run(self._with_rows(known), [known])
        return first + [self._run(self._with_rows(rows), [rows], copies=False)[0] for rows in others]

    def _with_rows(self, rows: int) -> list[tf.TensorSpec]:
        return with_other_rows(self._specs, self._cut, rows, unknown=None)

    def _run(
        self, specs: list[tf.TensorSpec], numbers: Sequence[int], at_least: int = 1, copies: bool = True
    ) -> list[_Run]:
        """Runs the pass on such numbers of rows of the example. The first must succeed, and `at_least` in all: all rows
        together may be too many for one worker. Then on copies of single rows, if wanted: a number of different
        values, or the length of the longest row, follows the values."""
        of_graph: dict[str, Callable[[np.ndarray], _Measured]] = {}

        def trace(*tensors: tf.Tensor) -> list[tf.Tensor]:
            with over_own_rows(Sizes) as scope:
                self._forward([mark_worker_dependent(tensor) for tensor in tensors])
            found = _made_of_sizes(tf.compat.v1.get_default_graph(), scope)
            of_graph.clear()
            of_graph.update({each.name.removeprefix(scope): _measured(each, scope) for each in found})
            return found

        function = tf.function(trace, autograph=False).get_concrete_function(*specs)
        given = self._example.like(specs, self._cut)
        take, count = taking(given, self._cut)
        batches = [[row % count for row in range(rows)] for rows in numbers]
        if copies:
            batches += [[row] * numbers[0] for row in sorted({0, count // 2, count - 1})]
        runs: list[_Run] = []
        with values_kept(written_variables(function)):
            for number, batch in enumerate(batches):
                try:
                    found = function(*take(given, batch))
                except Exception:
                    left = len(numbers) - 1 - number
                    if not number or (left >= 0 and len(runs) + left < at_least):
                        raise
                    continue
                named = zip(of_graph.items(), found, strict=True)
                runs.append({name: measured(tensor.numpy()) for (name, measured), tensor in named})
        return runs


def _measured(tensor: tf.Tensor, scope: str) -> Callable[[np.ndarray], _Measured]:
    """Describes a tensor; takes its value later."""
    inputs, selects = [each.name.removeprefix(scope) for each in tensor.op.inputs], tensor.op.type in _SELECT
    return functools.partial(_Measured, origin(tensor, scope), origin(tensor, scope, False), inputs, selects)


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
