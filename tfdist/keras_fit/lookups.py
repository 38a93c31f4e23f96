"""Finds the rows of a table that a batch looked up, and those looked up whatever the batch (positions, classes).

The gradient of a table is a list of rows, one for each lookup. Optimizers treat a row that is there twice differently
from one that is there once with the sum (Adam squares each, a norm adds up the squares). So the workers together must
hold the rows that one process would hold. Rows that the batch looked up are there once, on the worker that holds that
part of the batch: together all workers have them. But a row that one process looks up once, several workers look up,
and each has a part of its gradient: these parts must be added up. There are two such kinds: rows that are looked up
whatever the batch, by all workers; and those that the batch looked up, each once (tf.unique, sparse lookups), by the
workers that have any of its samples.

The graph tells the kinds apart: by whether the row numbers differ between workers (worker_dependence.py), and by the
operation that made them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING

import keras
import tensorflow as tf

from tfdist.control.exit_codes import ConfigError
from tfdist.keras_fit.worker_dependence import (
    is_worker_dependent,
    made_of,
    mark_worker_dependent,
    stateful_operations_marked,
)

if TYPE_CHECKING:
    from tfdist.keras_fit.forward import DistributedCall

_LOOKUPS = ("GatherV2", "ResourceGather")
_PASS_ON = ("Identity", "Reshape", "Cast", "ExpandDims", "Squeeze", "Placeholder")  # the same row numbers
# Their gradients leave the rows of a table rows.
_COPIES = ("ReadVariableOp", "Identity", "Cast", "Neg")
# Beside functions: look up a number of rows that is unknown, or give them the gradient of such a lookup.
_MAY_LOOK_UP = ("GatherNd", "ResourceGatherNd", "ConcatV2", "IdentityN")
_BRANCHES = ("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase", "TensorListReserve")


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A part of the gradient of a table: the rows of one lookup, and their numbers in the table."""

    values: tf.Tensor
    numbers: tf.Tensor
    is_worker_dependent: bool | None  # the numbers depend on the own rows of the batch; None: not visible
    has_each_row_once: bool = False  # in one process, whatever rows the batch has
    first_dim: int | None = None  # of the numbers as the lookup takes them, if it is known


def lookups(slices: tf.IndexedSlices) -> list[Lookup]:
    """The lookups that make up the gradient. Where their numbers come from is not visible outside of a graph, nor if
    they come out of a function in it."""
    if not hasattr(slices.indices, "graph"):
        return [Lookup(slices.values, slices.indices, None)]
    numbers = list(_parts(slices.indices))
    sizes = [tf.size(part) for part in numbers]
    values = tf.split(slices.values, sizes) if len(sizes) > 1 else [slices.values]
    for part, row_numbers in zip(values, numbers, strict=True):
        part.set_shape([row_numbers.shape[0], *slices.values.shape[1:]])
    return [
        Lookup(
            part,
            row_numbers,
            None if _is_hidden(row_numbers.op) else is_worker_dependent(row_numbers),
            _has_each_once(row_numbers),
            (row_numbers.op.inputs[0] if row_numbers.op.type == "Reshape" else row_numbers).shape[:1].as_list()[0],
        )
        for part, row_numbers in zip(values, numbers, strict=True)
    ]


def _has_each_once(numbers: tf.Tensor) -> bool:
    """Whether the row numbers were made so that none is there twice."""
    while passed_on := _passed_on(numbers.op):
        [numbers] = passed_on
    maker = {0: "Unique", 1: "SparseSegment"}.get(numbers.value_index)  # the latter: gradient of SparseSegmentSum, Mean
    return maker is not None and numbers.op.type.startswith(maker)


def _passed_on(op: tf.Operation) -> list[tf.Tensor]:
    """The row numbers that an operation passes on, if it does no more."""
    if op.type == "SelectV2" and op.inputs[1].op.type == "AddV2" and op.inputs[1].op.inputs[0] is op.inputs[2]:
        return [op.inputs[2]]  # Keras' lookups count negative numbers from the end
    return made_of(op)[:1] if op.type in _PASS_ON else []


def _is_hidden(op: tf.Operation) -> bool:
    """Whether nothing in this graph tells of what the operation makes its results."""
    return (op.type == "Placeholder" and not made_of(op)) or _calls_functions(op)


def _calls_functions(op: tf.Operation) -> bool:
    """Whether the operation calls functions, as those of branches, loops and tf.functions."""
    return any(attribute.type in ("func", "list(func)") for attribute in op.op_def.attr)


def _parts(numbers: tf.Tensor) -> Iterator[tf.Tensor]:
    """Yields the row numbers of each lookup, which a tape has concatenated."""
    while numbers.op.type == "Identity":
        numbers = numbers.op.inputs[0]
    if numbers.op.type == "ConcatV2":
        for part in numbers.op.inputs[:-1]:
            yield from _parts(part)
    else:
        yield numbers


@dataclasses.dataclass(frozen=True)
class LookupFacts:
    """Facts about a forward pass, read from a trace.

    Attributes: shared, the lookups of rows that several workers share, because they do not depend on the batch, or as
    each is looked up once: id of the table's handle -> name; rows, for each variable that it uses: id of the handle ->
    the number of rows of each lookup, None where it is unknown; branches, whether it has loops (of RNNs, tf.map_fn) or
    tf.cond, whose gradients XLA can take only if it compiles these gradients, too; counts_of_shared, `rows` of just the
    lookups that several workers share.
    """

    shared: dict[int, str]
    rows: dict[int, list[int | None]]
    branches: bool
    counts_of_shared: dict[int, list[int | None]]


def traced(function: Callable, arguments: list[tf.TensorSpec]) -> LookupFacts:
    """Traces `function`, without running it, on arguments that hold this worker's rows."""

    def trace(*arguments: tf.Tensor) -> list:
        with stateful_operations_marked():
            outputs = tf.nest.flatten(function([mark_worker_dependent(argument) for argument in arguments]))
        return [output for output in outputs if isinstance(output, tf.Tensor)]

    graph = tf.function(trace, autograph=False).get_concrete_function(*arguments).graph
    shared, rows, counts = dict[int, str](), dict[int, list[int | None]](), dict[int, list[int | None]]()
    for table, handle in graph.captures:
        if handle.dtype != tf.resource:
            continue
        uses = list(_uses(handle))
        known = [op for op in uses if op.type in _LOOKUPS and op.outputs[0].dtype.is_floating]
        unknown = [op for op in uses if _may_look_up(op)]
        rows[id(table)] = [*(op.inputs[1].shape.num_elements() for op in known), *(None for _ in unknown)]
        shared |= {id(table): op.name for op in uses if _looks_up_shared_rows(op)}
        counts[id(table)] = [op.inputs[1].shape.num_elements() for op in known if _looks_up_shared_rows(op)]
    definition = graph.as_graph_def()
    nodes = itertools.chain(definition.node, *(inner.node_def for inner in definition.library.function))
    return LookupFacts(shared, rows, any(node.op in _BRANCHES for node in nodes), counts)


def _uses(table: tf.Tensor) -> Iterator[tf.Operation]:
    """Yields the operations that take a table, or a mere copy of it."""
    for op in table.consumers():
        if op.type in _COPIES and op.outputs[0].dtype.is_floating:
            yield from _uses(op.outputs[0])
        else:
            yield op


def _looks_up_shared_rows(op: tf.Operation) -> bool:
    """Whether an operation that takes a table looks up rows that several workers share."""
    if op.type.startswith("SparseSegment"):
        return op.get_attr("sparse_gradient")  # which has each row once
    is_lookup = op.type in _LOOKUPS and op.outputs[0].dtype.is_floating
    return is_lookup and (_has_each_once(op.inputs[1]) or not is_worker_dependent(op.inputs[1]))


def _may_look_up(op: tf.Operation) -> bool:
    """Whether an operation that takes a table may look up rows of it, how many is unknown."""
    return op.type in _MAY_LOOK_UP or op.type.startswith("SparseSegment") or _calls_functions(op)


def shared_in(passes: Iterable[Callable[[], LookupFacts]]) -> dict[int, str]:
    """The lookups, in these forward passes, that do not depend on the batch. passes: functions that trace a pass to
    describe it."""
    shared = dict[int, str]()
    for find in passes:
        with contextlib.suppress(Exception):  # for a pass that failed: nothing was computed with it
            shared |= find().shared
    return shared


def counts_of_shared(
    passes: Iterable[Callable[..., LookupFacts]], handle: tf.Tensor, other: int
) -> tuple[set[int | None], set[int | None]]:
    """How many rows of the table with this handle are looked up whatever the batch is: (by lookups of which the number
    follows that of the batch's rows, by others). other: another number of rows than that of the passes."""
    following, fixed = set[int | None](), set[int | None]()
    for find in passes:
        with contextlib.suppress(Exception):  # as above, or the pass takes batches of one size only
            counts = [find(rows).counts_of_shared.get(id(handle), []) for rows in (None, other)]
            for now, then in zip(*counts, strict=True):
                (fixed if now == then else following).add(now)
    return following, fixed


def rows_in(passes: Iterable[Callable[[], LookupFacts]], handle: tf.Tensor) -> list[int | None]:
    """The number of rows of each lookup, in these forward passes, in the table with this handle, and None for what is
    unknown. passes: functions that trace a pass to describe it."""
    found: list[int | None] = []
    for find in passes:
        try:
            found += find().rows.get(id(handle), [])
        except Exception:  # noqa: BLE001 - the pass failed, or cannot be traced once more
            found.append(None)
    return found


def judged(lookup: Lookup, table: keras.Variable | tf.Variable, calls: Collection[DistributedCall]) -> Lookup:
    """Returns the lookup with a judgment from all forward passes, if its numbers do not show of what they are
    made."""
    if lookup.is_worker_dependent is not None:
        return lookup if lookup.is_worker_dependent else _judged_by_count(lookup, table, calls)
    for call in calls:
        name = call.shared_lookups().get(id(table.handle))
        if name:
            raise _not_told_apart(
                f"looks up rows of {table.name} whatever the batch is, as for positions, or each of them once, as"
                f" after tf.unique ({name})"
            )
    counts = [count for call in calls for count in call.rows_looked_up(table.handle)]
    all_rows = lookup.numbers.shape[0]
    known = [count for count in counts if count is not None]
    # Some of a pass's lookups may not be in the gradient.
    if any(known) and len(known) == len(counts) and all_rows and all_rows % math.gcd(*known):
        raise _not_told_apart(f"looks up rows of {table.name} in its call, and a step others outside of it")
    # Rows that no pass over own rows looks up were looked up outside, where all workers do the same.
    return dataclasses.replace(lookup, is_worker_dependent=bool(counts))


def _judged_by_count(lookup: Lookup, table: keras.Variable | tf.Variable, calls: Collection[DistributedCall]) -> Lookup:
    """Returns a lookup whose numbers do not depend on the batch, but as one of own rows if there are more numbers
    where the batch has more rows: zeros made for each row, in a batch of known size."""
    count = lookup.numbers.shape[0]
    found = [call.counts_of_shared(table.handle) for call in calls if lookup.first_dim in call.counts]
    follows = any(count in following for following, _ in found)
    if follows and any(count in fixed for _, fixed in found):
        raise _not_told_apart(f"looks up {count} rows of {table.name} for the rows of a batch, and others as many")
    return dataclasses.replace(lookup, is_worker_dependent=follows)


def _not_told_apart(what: str) -> ConfigError:
    return ConfigError(
        f"The model {what}, and its gradient is taken where tfdist cannot tell these rows from those of the batch:"
        " without run_eagerly=True, and in the same tf.function as the model's call, it can."
    )
