"""Tells of what a number in a graph is made, to compare it with that of another graph: the same name may mean another
tensor there."""

from __future__ import annotations

import tensorflow as tf

from tfdist.compat.tensorflow_functions import IN_PLACE

_LONGEST = 100  # operations between a size and what is made of it
Origin = tuple  # nested


def origin(tensor: tf.Tensor, scope: str, with_names_of_others: bool = True) -> Origin:
    """The operations in a scope that make a tensor of sizes of others, with their types and their names without the
    scope, back to those others' names, if these are wanted. Values of constants are left out: they differ with the
    number of rows.

    Results of tf.functions count as alike: a trial computes them in place, under other names."""
    return _origin(tensor, scope, with_names_of_others, _LONGEST, {})


def _origin(tensor: tf.Tensor, scope: str, with_others: bool, left: int, known: dict[str, Origin]) -> Origin:
    op = tensor.op
    name, place = op.name.removeprefix(scope), tensor.value_index
    if not op.name.startswith(scope):
        return ("outside",)
    if IN_PLACE in name or any(attribute.type == "func" and attribute.name == "f" for attribute in op.op_def.attr):
        return ("function",)
    if left == 0:
        return (name, place)
    if op.name not in known:
        inputs = op.inputs if with_others or op.type != "Shape" else ()
        next_left = 0 if op.type == "Shape" else left - 1
        made_of = (_origin(each, scope, with_others, next_left, known) for each in inputs)
        known[op.name] = (name, op.type, *made_of)
    return (known[op.name], place)
