"""The rules of operations that only move numbers: shapes, parts, and tables.

RULES also contains the rules of row_rules.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist.training.row_checks.row_rules import (
    FREE,
    MIXED,
    RULES,
    Kind,
    Rows,
    agreed,
    are_rows_or_free,
    axis_of,
    constant,
    of,
    only,
    rank_of,
    shape_of,
)

__all__ = ["RULES"]

# -- shapes ------------------------------------------------------------------------------------------------------------


@of("Reshape")
def _reshape(operation: tf.Operation, kinds: Sequence[Kind], rows: int) -> Kind:
    """Dims before the rows must stay; among the following dims, rows must be outermost before and after."""
    x, before, after = kinds[0], shape_of(operation.inputs[0]), shape_of(operation.outputs[0])
    if not isinstance(x, Rows) or not before or not after:
        return MIXED
    kept = before[: x.axis] if math.prod(before[: x.axis]) != 1 else []
    if after[: len(kept)] != kept:
        return MIXED
    axis = next((place for place in range(len(kept), len(after)) if after[place] != 1), None)
    if axis is None or after[axis] % rows:
        return MIXED
    return Rows(axis, after[axis] // rows)


@of("ExpandDims")
def _expand_dims(operation: tf.Operation, kinds: Sequence[Kind], rows: int) -> Kind:
    x, axis = only(kinds, 0), axis_of(operation, 1, rank_of(operation.outputs[0]))
    return MIXED if x is None or axis is None else x._replace(axis=x.axis + (axis <= x.axis))


@of("Squeeze")
def _squeeze(operation: tf.Operation, kinds: Sequence[Kind], rows: int) -> Kind:
    x, shape = only(kinds, 0), shape_of(operation.inputs[0])
    if x is None or not shape:
        return MIXED
    gone = {axis % len(shape) for axis in operation.get_attr("squeeze_dims")}
    gone = gone or {axis for axis, size in enumerate(shape) if size == 1}
    return MIXED if x.axis in gone else x._replace(axis=x.axis - sum(axis < x.axis for axis in gone))


@of("Transpose")
def _transpose(operation: tf.Operation, kinds: Sequence[Kind], rows: int) -> Kind:
    x, order = only(kinds, 0), constant(operation, 1)
    return MIXED if x is None or order is None else x._replace(axis=list(order).index(x.axis))


@of("Pack")
def _pack(operation: tf.Operation, kinds: Sequence[Kind], rows: int) -> Kind:
    axis = operation.get_attr("axis") % rank_of(operation.outputs[0])
    x = agreed(kinds)
    return x._replace(axis=x.axis + (axis <= x.axis)) if isinstance(x, Rows) else MIXED


@of("ConcatV2")
def _concat(operation: tf.Operation, kinds: Sequence[Kind], rows: int) -> Kind:
    x, axis = agreed(kinds[:-1]), axis_of(operation, len(kinds) - 1, rank_of(operation.outputs[0]))
    return x if isinstance(x, Rows) and axis is not None and axis != x.axis else MIXED


@of("Unpack")
def _unpack(operation: tf.Operation, kinds: Sequence[Kind], rows: int) -> Kind:
    x, axis = only(kinds, 0), operation.get_attr("axis") % rank_of(operation.inputs[0])
    return MIXED if x is None or axis == x.axis else x._replace(axis=x.axis - (axis < x.axis))


@of("Split SplitV")
def _split(operation: tf.Operation, kinds: Sequence[Kind], rows: int) -> Kind:
    value, how = (1, 0) if operation.type == "Split" else (0, 2)
    x, axis = only(kinds, value), axis_of(operation, how, rank_of(operation.inputs[value]))
    return MIXED if x is None or axis is None or axis == x.axis else x


@of("Slice")
def _slice(operation: tf.Operation, kinds: Sequence[Kind], rows: int) -> Kind:
    x, begin, size = only(kinds, 0), constant(operation, 1), constant(operation, 2)
    if x is None or begin is None or size is None:
        return MIXED
    return x if begin[x.axis] == 0 and size[x.axis] in (-1, rows * x.each) else MIXED


@of("StridedSlice")
def _strided_slice(operation: tf.Operation, kinds: Sequence[Kind], rows: int) -> Kind:
    x, begin, end, strides = only(kinds, 0), *(constant(operation, place) for place in (1, 2, 3))
    if x is None or begin is None or end is None or strides is None:
        return MIXED
    masks = {
        name: operation.get_attr(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    said = [{name for name, mask in masks.items() if mask >> place & 1} for place in range(len(begin))]
    taken = sum(not names & {"ellipsis", "new_axis"} for names in said)
    if not any("ellipsis" in names for names in said):
        said.append({"ellipsis"})
    source = target = 0
    for place, names in enumerate(said):
        if "ellipsis" in names:
            skipped = rank_of(operation.inputs[0]) - taken
            if source <= x.axis < source + skipped:
                return x._replace(axis=target + x.axis - source)
            source, target = source + skipped, target + skipped
        elif "new_axis" in names:
            target += 1
        else:
            if source == x.axis:
                is_whole = (
                    strides[place] == 1
                    and ("begin" in names or begin[place] == 0)
                    and ("end" in names or end[place] >= rows * x.each)
                )
                return x._replace(axis=target) if is_whole and "shrink_axis" not in names else MIXED
            source, target = source + 1, target + ("shrink_axis" not in names)
    return MIXED


@of("MirrorPad Pad PadV2")
def _pad(operation: tf.Operation, kinds: Sequence[Kind], rows: int) -> Kind:
    x, paddings = only(kinds, 0), constant(operation, 1)
    return x if x and paddings is not None and not np.any(paddings[x.axis]) else MIXED


@of("Tile")
def _tile(operation: tf.Operation, kinds: Sequence[Kind], rows: int) -> Kind:
    x, shapes = only(kinds, 0), [shape_of(tensor) for tensor in (operation.inputs[0], operation.outputs[0])]
    return x if x and shapes[0] and shapes[1] and shapes[0][x.axis] == shapes[1][x.axis] else MIXED


# -- tables ------------------------------------------------------------------------------------------------------------


@of("GatherV2 ResourceGather")
def _gather(operation: tf.Operation, kinds: Sequence[Kind], rows: int) -> Kind:
    """outputs = params[:axis] + indices[batch_dims:] + params[axis + 1:]"""
    table, places = kinds[:2]
    if not are_rows_or_free(kinds):
        return MIXED
    alike, rank = operation.get_attr("batch_dims"), rank_of(operation.inputs[1])
    alike += rank if alike < 0 else 0
    axis = 0 if len(kinds) < 3 else axis_of(operation, 2, rank_of(operation.inputs[0]))
    if axis is None or (len(kinds) > 2 and kinds[2] != FREE) or (operation.type == "ResourceGather" and alike):
        return MIXED
    found = []
    if isinstance(table, Rows):
        if table.axis == axis or (table.axis < alike and not isinstance(places, Rows)):
            return MIXED
        found.append(table if table.axis < axis else table._replace(axis=table.axis + rank - alike - 1))
    if isinstance(places, Rows):
        found.append(places if places.axis < alike else places._replace(axis=axis + places.axis - alike))
    return agreed(found)


@of("GatherNd")
def _gather_nd(operation: tf.Operation, kinds: Sequence[Kind], rows: int) -> Kind:
    places = only(kinds, 1)
    return places if places and places.axis < rank_of(operation.inputs[1]) - 1 else MIXED


@of("OneHot")
def _one_hot(operation: tf.Operation, kinds: Sequence[Kind], rows: int) -> Kind:
    x, axis = only(kinds, 0), operation.get_attr("axis")
    return MIXED if x is None else x._replace(axis=x.axis + (0 <= axis <= x.axis))
