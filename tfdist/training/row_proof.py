"""That what a model returns for a row has to do with no other row, proved from its graph.

The model is traced, not run, with two numbers of rows. Both graphs are followed from the inputs, operation by
operation, by rules of what each does with rows (row_rules.py). What the two graphs have in common cannot be made of the
number of rows, and a dim that differs is one along which rows lie. All weights and states are unknown to a trace, so
that none of their values can hide anything. What is not proved may be true all the same: then row_mixing.py tries it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat import keras_layers
from tfdist.compat.keras_tensors import mask_of
from tfdist.compat.tensorflow_graphs import function_graph, operation_number
from tfdist.runtime import batch_norm
from tfdist.training.calm_layers import calmed
from tfdist.training.loss_probe import ROWS, Take
from tfdist.training.row_rules import FREE, MIXED, SIZES, Kind, Rows, shape_of
from tfdist.training.row_shape_rules import RULES
from tfdist.training.stateless_call import stateless_call

_SIZE_QUESTIONS = ("Rank", "Shape", "ShapeN", "Size")
# What makes a tensor of a given shape, which is input 0 or 1, of what is the same for each row.
_MADE_OF_SHAPE = {
    **dict.fromkeys(("BroadcastTo", "Tile"), 1),
    "Fill": 0,
    **dict.fromkeys(("RandomStandardNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal"), 0),
    **dict.fromkeys((f"StatelessRandom{kind}" for kind in ("NormalV2", "UniformV2", "UniformIntV2")), 0),
    **dict.fromkeys(("StatelessTruncatedNormalV2", "StatelessRandomUniformFullIntV2"), 0),
}
_SAID_ELSEWHERE = ("value", "shape")  # attributes of which tensors and shapes tell


class Proof(NamedTuple):
    """Of a model, in training or in inference.

    apart: its outputs for a row are made of that row alone. adds_nothing: no layer adds a loss.
    """

    apart: bool
    adds_nothing: bool


class Proofs:
    """Of one model, each made when it is asked for, once. x, take, count, many: as for row_mixing.mixes."""

    def __init__(self, model: keras.Model, many: int = ROWS):
        self._model, many = model, max(many, ROWS)
        # Far apart, for what is done above a number of rows only; without a common divisor, so that what is repeated
        # as often as a part of the rows does not look like rows.
        self._counts = many, next(few for few in itertools.count(2) if math.gcd(few, many) == 1)
        self._made: dict[bool, Proof] = {}

    def of(self, x: Any, take: Take, count: int, training: bool) -> Proof:
        if training not in self._made:
            try:
                self._made[training] = _prove(self._model, x, take, count, training, self._counts)
            except Exception:  # noqa: BLE001 - of the user's own making, such as a model that takes batches of one size
                self._made[training] = Proof(False, False)
        return self._made[training]


class _Trace(NamedTuple):
    """inputs: by name, what is known of them. outputs: with the masks that they carry."""

    rows: int
    operations: Sequence[tf.Operation]
    inputs: set[str]
    outputs: list[tf.Tensor]
    losses: list[Any]


def _prove(model: keras.Model, x: Any, take: Take, count: int, training: bool, counts: Sequence[int]) -> Proof:
    if not all(layer.built for layer in keras_layers.all_layers(model)):
        return Proof(False, False)  # a trace is no place to make variables
    more, fewer = (_traced(model, take(x, [row % count for row in range(rows)]), rows, training) for rows in counts)
    return Proof(_are_apart(more, fewer), not more.losses and not fewer.losses)


def _traced(model: keras.Model, x: Any, rows: int, training: bool) -> _Trace:
    layers, losses = list(keras_layers.all_layers(model)), []

    def placeholder(value: Any) -> tf.Tensor:
        return tf.compat.v1.placeholder(value.dtype, value.shape)

    with function_graph("rows").as_default() as graph:
        x = keras.tree.map_structure(placeholder, x)
        weights, states = (
            [placeholder(variable) for variable in group]
            for group in (model.trainable_variables, model.non_trainable_variables)
        )
        told = calmed(layers, lambda _, loss: losses.append(loss))
        with told, batch_norm.each_alone(), _attributes_kept(layers):
            found = keras.tree.flatten(stateless_call(model, weights, states, x, training).outputs)
        masks = [mask for output in found if (mask := mask_of(output)) is not None]
    inputs = {leaf.name for leaf in keras.tree.flatten(x)}
    return _Trace(rows, graph.get_operations(), inputs, [*found, *masks], losses)


@contextlib.contextmanager
def _attributes_kept(layers: Sequence[keras.Layer]) -> Iterator[None]:
    """What layers remember of a trace, such as a constant that is made once, is of no use in another graph."""
    before = [(layer.__dict__, dict(layer.__dict__)) for layer in layers]
    try:
        yield
    finally:
        for now, attributes in before:
            for name in [name for name in now if name not in attributes]:
                del now[name]
            now.update(attributes)


# -- following the rows ------------------------------------------------------------------------------------------------


def _are_apart(more: _Trace, fewer: _Trace) -> bool:
    traces = (more, fewer)
    known: tuple[dict, dict] = ({}, {})
    if len(more.operations) != len(fewer.operations) or len(more.outputs) != len(fewer.outputs):
        return False
    for pair in zip(more.operations, fewer.operations, strict=True):
        one, other = ([found[_place(leaf)] for leaf in op.inputs] for op, found in zip(pair, known, strict=True))
        if len({(op.type, len(op.outputs)) for op in pair}) > 1 or one != other or _is_written(pair[0], one):
            return False
        kinds = _kinds_of(pair, one, traces)
        for operation, found in zip(pair, known, strict=True):
            found.update(zip(map(_place, operation.outputs), kinds, strict=True))
    return all(
        found.get(_place(output)) in (FREE, Rows(0, 1))
        for trace, found in zip(traces, known, strict=True)
        for output in trace.outputs
    )


def _place(tensor: tf.Tensor) -> tuple[int, int]:
    return operation_number(tensor.op), tensor.value_index


def _is_written(operation: tf.Operation, kinds: Sequence[Kind]) -> bool:
    """Whether it may put what is made of rows where others read it."""
    has_state = any(leaf.dtype in (tf.resource, tf.variant) for leaf in operation.inputs)
    return has_state and any(kind != FREE for kind in kinds) and operation.type != "ResourceGather"


def _kinds_of(pair: tuple[tf.Operation, tf.Operation], kinds: Sequence[Kind], traces: tuple[_Trace, _Trace]) -> list:
    """Of the outputs of an operation, of which the two traces have one each."""
    outputs = list(zip(pair[0].outputs, pair[1].outputs, strict=True))
    if pair[0].type == "Placeholder":
        known = [_along(both, traces) for both in outputs]
        return known if pair[0].outputs[0].name in traces[0].inputs or known == [FREE] else [SIZES]
    if pair[0].type == "Const":
        return [_of_constants(pair, traces)]
    if MIXED in kinds or not _are_alike(pair):
        return [MIXED] * len(outputs)
    if not any(isinstance(kind, Rows) for kind in kinds):
        return [_without_rows(pair, kinds, both, traces) for both in outputs]
    if pair[0].type in _SIZE_QUESTIONS:
        return [SIZES] * len(outputs)
    if pair[0].type == "IdentityN":
        return list(kinds)
    rule = RULES.get(pair[0].type)
    if rule is None:
        return [MIXED] * len(outputs)
    one, other = (rule(operation, kinds, trace.rows) for operation, trace in zip(pair, traces, strict=True))
    return [one if one == other == _along(both, traces) else MIXED for both in outputs]


def _along(both: tuple[tf.Tensor, tf.Tensor], traces: tuple[_Trace, _Trace]) -> Kind:
    """Where rows lie: along the one dim that differs as the numbers of rows do; FREE if none does."""
    one, other = map(shape_of, both)
    if one is None or other is None or len(one) != len(other):
        return MIXED
    differing = [axis for axis, sizes in enumerate(zip(one, other, strict=True)) if sizes[0] != sizes[1]]
    if not differing:
        return FREE
    axis = differing[0]
    each, rest = divmod(one[axis], traces[0].rows)
    return Rows(axis, each) if len(differing) == 1 and not rest and other[axis] == each * traces[1].rows else SIZES


def _of_constants(pair: tuple[tf.Operation, tf.Operation], traces: tuple[_Trace, _Trace]) -> Kind:
    one, other = (operation.get_attr("value") for operation in pair)
    if one == other:
        return FREE
    values = [tf.make_ndarray(value) for value in (one, other)]
    first = values[0].reshape(-1)[:1]
    is_one_number = first.size and all(value.size and bool(np.all(value == first)) for value in values)
    return _along((pair[0].outputs[0], pair[1].outputs[0]), traces) if is_one_number else SIZES


def _without_rows(
    pair: tuple[tf.Operation, tf.Operation],
    kinds: Sequence[Kind],
    both: tuple[tf.Tensor, tf.Tensor],
    traces: tuple[_Trace, _Trace],
) -> Kind:
    """The output of what sees no rows, but may know how many there are."""
    along, shape = _along(both, traces), _MADE_OF_SHAPE.get(pair[0].type)
    others = [kind for place, kind in enumerate(kinds) if place != shape]
    if shape is None or any(kind != FREE for kind in others):
        return FREE if along == FREE and (SIZES not in kinds or _is_one_number(*both)) else SIZES
    return along


def _is_one_number(more: tf.Tensor, fewer: tf.Tensor) -> bool:
    """Such as the length of a sequence, which is read from a shape as the number of rows is."""
    one, other = tf.get_static_value(more), tf.get_static_value(fewer)
    return one is not None and other is not None and bool(np.array_equal(one, other))


def _are_alike(pair: tuple[tf.Operation, tf.Operation]) -> bool:
    """Whether the two do the same: a number of rows can hide in an attribute, too."""
    one, other = (
        {name: value for name, value in each.node_def.attr.items() if name not in _SAID_ELSEWHERE and name[0] != "_"}
        for each in pair
    )
    return one == other
