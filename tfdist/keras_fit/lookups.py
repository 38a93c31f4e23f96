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

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import keras
import tensorflow as tf

from tfdist.compat.tensorflow_graphs import kinds_of_operations
from tfdist.control.exit_codes import ConfigError
from tfdist.keras_fit.worker_dependence import (
    Sizes,
    made_of,
    mark_worker_dependent,
    over_own_rows,
    why_untold,
    worker_dependence,
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
    is_untold: bool = False  # nobody can tell whether the numbers depend on the own rows
    why_untold: str = ""  # the error of a trial, if that is the reason


def lookups(slices: tf.IndexedSlices) -> list[Lookup]:
    """The lookups that make up the gradient. Where their numbers come from is not visible outside of a graph, nor if
    they come out of a function in it."""
    if not hasattr(slices.indices, "graph"):
        return [Lookup(slices.values, slices.indices, None)]
    numbers = list(_parts(slices.indices))
    sizes = [tf.size(part) for part in numbers]
    values = tf.split(slices.values, sizes) if len(sizes) > 1 else [slices.values]
    found = []
    for part, row_numbers in zip(values, numbers, strict=True):
        part.set_shape([row_numbers.shape[0], *slices.values.shape[1:]])
        is_hidden = _is_hidden(row_numbers.op)
        differs = None if is_hidden else worker_dependence(row_numbers)
        is_untold = differs is None and not is_hidden
        why = why_untold(row_numbers) if is_untold else ""
        found.append(Lookup(part, row_numbers, differs, _has_each_once(row_numbers), is_untold, why))
    return found


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


class Use(NamedTuple):
    """How a forward pass uses a table.

    Attributes: table, the id of its handle; rows, how many it looks up, None if that is unknown; is_shared, whether
    several workers share these rows, because they do not depend on the batch, or as each is looked up once.
    """

    table: int
    name: str
    rows: int | None
    is_shared: bool


class LookupFacts(NamedTuple):
    """What a trace tells of a forward pass. branches: whether it has loops (of RNNs, tf.map_fn) or tf.cond, whose
    gradients XLA can take only if it compiles these gradients, too."""

    uses: list[Use]
    branches: bool


def traced(function: Callable, arguments: list[tf.TensorSpec], sizes: Callable[[], Sizes]) -> LookupFacts:
    """Traces `function`, without running it, on arguments that hold this worker's rows. sizes: see over_own_rows."""

    def trace(*arguments: tf.Tensor) -> list:
        with over_own_rows(sizes):
            outputs = tf.nest.flatten(function([mark_worker_dependent(argument) for argument in arguments]))
        return [output for output in outputs if isinstance(output, tf.Tensor)]

    graph = tf.function(trace, autograph=False).get_concrete_function(*arguments).graph
    uses = [
        Use(id(table), op.name, op.inputs[1].shape.num_elements() if _is_lookup(op) else None, _is_shared(op))
        for table, handle in graph.captures
        if handle.dtype == tf.resource
        for op in _users(handle)
        if _is_lookup(op) or _may_look_up(op)
    ]
    return LookupFacts(uses, not kinds_of_operations(graph)[0].isdisjoint(_BRANCHES))


def uses_in(find: Callable[[int | None], LookupFacts], handle: tf.Tensor, rows: int | None) -> list[Use]:
    """How a forward pass uses the table with this handle; one unknown use if the pass has failed, cannot be traced once
    more, or takes no batches of another size. find: traces it, on this number of rows, to describe it."""
    try:
        return [use for use in find(rows).uses if use.table == id(handle)]
    except Exception:  # noqa: BLE001 - whatever Keras and TensorFlow raise
        return [Use(id(handle), "", None, is_shared=False)]


def _users(table: tf.Tensor) -> Iterator[tf.Operation]:
    """Yields the operations that take a table, or a mere copy of it."""
    for op in table.consumers():
        if op.type in _COPIES and op.outputs[0].dtype.is_floating:
            yield from _users(op.outputs[0])
        else:
            yield op


def _is_lookup(op: tf.Operation) -> bool:
    return op.type in _LOOKUPS and op.outputs[0].dtype.is_floating


def _is_shared(op: tf.Operation) -> bool:
    """Whether an operation that takes a table looks up rows that several workers share."""
    if op.type.startswith("SparseSegment"):
        return op.get_attr("sparse_gradient")  # which has each row once
    if not _is_lookup(op):
        return False
    # What nobody can tell must be seen where gradients are taken, so XLA may not compile it.
    return _has_each_once(op.inputs[1]) or not worker_dependence(op.inputs[1])


def _may_look_up(op: tf.Operation) -> bool:
    """Whether an operation that takes a table may look up rows of it, how many is unknown."""
    return op.type in _MAY_LOOK_UP or op.type.startswith("SparseSegment") or _calls_functions(op)


def judged(lookup: Lookup, table: keras.Variable | tf.Variable, calls: Collection[DistributedCall]) -> Lookup:
    """Returns the lookup with a judgment from all forward passes, if its numbers do not show of what they are
    made."""
    if lookup.is_untold:
        why, fix = (
            (f"the model's call fails when it is tried on other rows ({lookup.why_untold})", "let it take any number")
            if lookup.why_untold
            else ("the size is calculated from others, or in a function or branch", "take it from one shape, outside")
        )
        raise ConfigError(
            f"The model looks up rows of {table.name} by numbers made of the size of a tensor (tf.shape, ops.shape),"
            f" and tfdist cannot tell whether it is the number of rows of the batch: {why}. Mend the call ({fix}), or"
            " train in one process."
        )
    if lookup.is_worker_dependent is not None:
        return lookup if lookup.is_worker_dependent else _judged_by_count(lookup, table, calls)
    uses = [use for call in calls for of_pass in call.uses_of(table.handle) for use in of_pass]
    if shared := [use for use in uses if use.is_shared]:
        raise _not_told_apart(
            f"looks up rows of {table.name} whatever the batch is, as for positions, or each of them once, as"
            f" after tf.unique ({shared[0].name})"
        )
    all_rows = lookup.numbers.shape[0]
    known = [use.rows for use in uses if use.rows is not None]
    # Some of a pass's lookups may not be in the gradient.
    if any(known) and len(known) == len(uses) and all_rows and all_rows % math.gcd(*known):
        raise _not_told_apart(f"looks up rows of {table.name} in its call, and a step others outside of it")
    # Rows that no pass over own rows looks up were looked up outside, where all workers do the same.
    return dataclasses.replace(lookup, is_worker_dependent=bool(uses))


def _by_name(uses: Sequence[Use], others: Sequence[Use]) -> list[tuple[Use, Use]]:
    """The uses that two traces of a pass have in common."""
    named = {use.name: use for use in others}
    return [(use, named[use.name]) for use in uses if use.name in named]


def _judged_by_count(lookup: Lookup, table: keras.Variable | tf.Variable, calls: Collection[DistributedCall]) -> Lookup:
    """Returns a lookup whose numbers do not depend on the batch, but as one of own rows if one process, which has all
    rows, looks up another number of rows: zeros made for each row, in a batch of known size."""
    count, handle = lookup.numbers.shape[0], table.handle
    follows = {
        (now.rows, now.is_shared) != (then.rows, then.is_shared)
        for call in calls
        if count and any(count % own_rows == 0 for own_rows in call.counts)
        if any(call.uses_of(handle))  # else it is another model's, which need not be traced once more
        for uses in zip(call.uses_of(handle), call.uses_of(handle, max(call.counts.values())), strict=True)
        for now, then in _by_name(*uses)
        if now.is_shared and now.rows == count
    }
    if len(follows) > 1:
        raise _not_told_apart(f"looks up {count} rows of {table.name} for the rows of a batch, and others as many")
    return dataclasses.replace(lookup, is_worker_dependent=True in follows)


def _not_told_apart(what: str) -> ConfigError:
    return ConfigError(
        f"The model {what}, and its gradient is taken where tfdist cannot tell these rows from those of the batch:"
        " without run_eagerly=True, and in the same tf.function as the model's call, it can."
    )
