"""Proves from a model's graph that its output for a row depends on no other row.

The model is traced, not run, with several numbers of rows. The graphs must have the same wiring. They are followed from
the inputs, operation by operation, with rules of what each operation does with rows (row_rules.py). Values that are the
same in all graphs do not depend on the number of rows, and rows lie along a dim whose size differs. The values of
weights and states are unknown to a trace, so they cannot hide anything. Outputs without a proof may still be
independent: then row_mixing.py tries the model.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat import keras_layers
from tfdist.compat.tensorflow_graphs import operation_number
from tfdist.training.row_checks.calm_layers import is_the_same_in_training
from tfdist.training.row_checks.model_probe import ROWS, Take
from tfdist.training.row_checks.random_mixing import Draws, what_is_drawn
from tfdist.training.row_checks.row_rules import FREE, MIXED, SIZES, Kind, Rows, has_zero_factor, shape_of
from tfdist.training.row_checks.row_shape_rules import RULES
from tfdist.training.row_checks.row_traces import Place, Trace, of_call, traced

_TRIED, _PARTS = 64, 4  # a trial may use more rows than a part: a forward pass keeps less memory than a step
_LARGEST = 10_000_000  # numbers in the rows of a trial, unless a part has as many
# Numbers of rows in traces beside that of a whole batch, to find code that only runs above some number of rows, or that
# assumes an even number. For Keras' own code, which has no such limits, two are enough.
_COUNTS, _COUNTS_OF_KERAS = (4, 3, 2), (3, 2)
_SIZE_QUESTIONS = ("Rank", "Shape", "ShapeN", "Size")
# Operations that make a tensor of a given shape (input 0 or 1) from values that are the same for each row. Not random
# operations: with a fixed seed their numbers belong to places.
_MADE_OF_SHAPE = {"BroadcastTo": 1, "Tile": 1, "Fill": 0}
_SAID_ELSEWHERE = ("value", "shape")  # attributes that the tensors and their shapes already show
# The stateful operations that are understood.
_WRITES = ("AssignAddVariableOp", "AssignSubVariableOp", "AssignVariableOp")
_READS = ("Placeholder", "ReadVariableOp", "ResourceGather", "VarHandleOp", "VarIsInitializedOp")


class Proof(NamedTuple):
    """What was proved about a model, in training or in inference.

    apart: its outputs for a row depend on that row alone, and all gradients are TensorFlow's own. adds_nothing: no
    layer adds a loss. draws: if not apart, the random draws in the graph, if known; without those of Keras' own layers.
    """

    apart: bool
    adds_nothing: bool
    draws: Draws | None = None


def rows_tried(many: int, part: int, width: int = 1) -> int:
    """Returns the number of rows for trials of code that sees `part` of `many` rows at a time, with about as much
    memory as a step has for these. width: numbers in a row of what is made for the trial.
    """
    return min(many, max(part, min(max(_TRIED, _PARTS * part), _LARGEST // max(width, 1))))


class Proofs:
    """The proofs for one model, each made once, on demand. x, take: as for row_mixing.mixes.

    many: rows of a batch of one process; code with a capacity for some rows only shows with that many. part: rows that
    the model sees at a time in training.

    Attributes: tried: rows for trials of a model without proof, given memory for `part` rows; `part` is tried as well.
    """

    def __init__(self, model: keras.Model, many: int = ROWS, part: int = 0):
        self._model, self.many = model, max(many, ROWS)
        self.tried = rows_tried(self.many, part) if part else self.many
        self._is_the_same = is_the_same_in_training(model)
        self.part = part or self.many
        counts = _COUNTS_OF_KERAS if self._is_the_same else (self.part, *_COUNTS)
        self._counts = sorted({self.many, *counts}, reverse=True)
        self._made: dict[bool, Proof] = {}

    def of(self, x: Any, take: Take, training: bool) -> Proof:
        training = training and not self._is_the_same  # if it is the same, one proof holds for both
        if training not in self._made:
            try:
                self._made[training] = _prove(self._model, x, take, training, self._counts)
            except Exception:  # noqa: BLE001 - user code may raise, such as a model that takes batches of one size
                self._made[training] = Proof(False, False)
        return self._made[training]


def _prove(model: keras.Model, x: Any, take: Take, training: bool, counts: Sequence[int]) -> Proof:
    if not keras_layers.all_built(model):
        return Proof(False, False)  # variables must not be created in a trace
    traces = traced(model, x, take, training, counts)
    apart, adds_nothing = _are_apart(traces), not any(trace.losses for trace in traces)
    # If rows are not apart, there is at least one operation.
    return Proof(apart, adds_nothing, None if apart else what_is_drawn(traces[0].operations[0].graph))


# -- following the rows ------------------------------------------------------------------------------------------------


def _are_apart(traces: Sequence[Trace]) -> bool:
    outputs = _followed(traces, None)
    return outputs is not None and all(kind in (FREE, Rows(0, 1)) for kind in outputs)


def _followed(traces: Sequence[Trace], given: Sequence[Kind] | None) -> list[Kind] | None:
    """Returns the kinds of the outputs; None if the traces do not tell. given: the kinds of the inputs of a function;
    None for a model, whose inputs have rows."""
    first = traces[0]
    if first.has_own_gradients or not all(_are_wired_alike(trace, first) for trace in traces):
        return None
    known: dict[Place, Kind] = {}
    numbers = [{operation_number(each): place for place, each in enumerate(trace.operations)} for trace in traces]
    for number, same in enumerate(zip(*(trace.operations for trace in traces), strict=True)):
        wired = [
            [Place(places[operation_number(leaf.op)], leaf.value_index) for leaf in each.inputs]
            for each, places in zip(same, numbers, strict=True)
        ]
        if len({(each.type, len(each.outputs)) for each in same}) > 1 or any(wires != wired[0] for wires in wired):
            return None
        kinds, here = [known[place] for place in wired[0]], Place(number, 0)
        if given is not None and here in first.inputs:
            found: list[Kind] | None = [given[first.inputs.index(here)]]
        elif functions := [each for each in map(_of_call, same, traces) if each]:
            found = _followed(functions, kinds)
        elif _is_understood(same[0], kinds):
            outputs = list(zip(*(each.outputs for each in same), strict=True))
            found = _kinds_of(same, kinds, traces, outputs, here in first.inputs)
        else:
            found = None
        if found is None:
            return None
        known.update({Place(number, index): kind for index, kind in enumerate(found)})
    return [known[place] for place in first.outputs]


def _are_wired_alike(trace: Trace, first: Trace) -> bool:
    """Returns whether both have equally many operations, and the same inputs, outputs and captured values."""
    sizes = [(len(each.operations), each.inputs, each.outputs, len(each.captured)) for each in (trace, first)]
    return sizes[0] == sizes[1] and all(map(operator.is_, trace.captured, first.captured))


def _of_call(operation: tf.Operation, trace: Trace) -> Trace | None:
    return of_call(operation, trace.rows)


def _is_understood(operation: tf.Operation, kinds: Sequence[Kind]) -> bool:
    """Returns whether the operation cannot store anything computed from rows where others read it."""
    if operation.type in _READS:
        return True
    if operation.type in _WRITES or any(leaf.dtype in (tf.resource, tf.variant) for leaf in operation.inputs):
        return all(kind == FREE for kind in kinds)
    return not operation.op_def.is_stateful


def _kinds_of(
    same: tuple[tf.Operation, ...],
    kinds: Sequence[Kind],
    traces: Sequence[Trace],
    outputs: list[tuple[tf.Tensor, ...]],
    is_given: bool,
) -> list[Kind]:
    """Returns the kinds of the outputs of an operation. same: this operation in each trace."""
    along, kind = [_along(each, traces) for each in outputs], same[0].type
    if kind == "Placeholder":
        return along if is_given or along == [FREE] else [SIZES]
    if kind == "Const":
        return [_of_constants(same, along[0])]
    if kind == "Mul" and all(has_zero_factor(each) for each in same):
        return along  # zeros: in this way a loss that is only added is connected to an output of Keras' graph
    if MIXED in kinds or not _are_alike(same):
        return [MIXED] * len(outputs)
    if not any(isinstance(each, Rows) for each in kinds):
        return [_without_rows(kind, kinds, *each) for each in zip(along, outputs, strict=True)]
    if kind in _SIZE_QUESTIONS:
        return [SIZES] * len(outputs)
    if kind == "IdentityN":
        return list(kinds)
    rule = RULES.get(kind)
    if rule is None:
        return [MIXED] * len(outputs)
    said = {rule(operation, kinds, trace.rows) for operation, trace in zip(same, traces, strict=True)}
    return [each if said == {each} else MIXED for each in along]


def _along(same: Sequence[tf.Tensor], traces: Sequence[Trace]) -> Kind:
    """Returns the dim along which rows lie: its size differs as the numbers of rows do; FREE if no dim differs."""
    shapes = [shape_of(tensor) for tensor in same]
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes) or len({len(shape) for shape in known}) > 1:
        return MIXED
    differing = [axis for axis, sizes in enumerate(zip(*known, strict=True)) if len(set(sizes)) > 1]
    if not differing:
        return FREE
    axis = differing[0]
    each = known[0][axis] // traces[0].rows
    fits = all(shape[axis] == each * trace.rows for shape, trace in zip(known, traces, strict=True))
    return Rows(axis, each) if len(differing) == 1 and fits else SIZES


def _of_constants(same: Sequence[tf.Operation], along: Kind) -> Kind:
    protos = [operation.get_attr("value") for operation in same]
    if all(proto == protos[0] for proto in protos):
        return FREE
    values = [tf.make_ndarray(proto).reshape(-1) for proto in protos]
    is_one_number = all(value.size for value in values) and len({each.tobytes() for v in values for each in v}) == 1
    return along if is_one_number else SIZES


def _without_rows(kind: str, kinds: Sequence[Kind], along: Kind, same: Sequence[tf.Tensor]) -> Kind:
    """Returns the kind of the output of an operation that sees no rows, but may know their number."""
    shape = _MADE_OF_SHAPE.get(kind)
    if shape is None or any(each != FREE for place, each in enumerate(kinds) if place != shape):
        return FREE if along == FREE and (SIZES not in kinds or _is_one_number(same)) else SIZES
    return along


def _is_one_number(same: Sequence[tf.Tensor]) -> bool:
    """Returns whether all traces have the same value, such as a sequence's length, which is read from a shape as the
    number of rows is."""
    values = [tf.get_static_value(tensor) for tensor in same]
    return all(value is not None and np.array_equal(value, values[0]) for value in values)


def _are_alike(same: Sequence[tf.Operation]) -> bool:
    """Returns whether all do the same: a number of rows may also hide in an attribute."""
    attributes = [
        {name: value for name, value in each.node_def.attr.items() if name not in _SAID_ELSEWHERE and name[0] != "_"}
        for each in same
    ]
    return all(each == attributes[0] for each in attributes)
