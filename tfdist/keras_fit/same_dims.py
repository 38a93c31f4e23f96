"""Which dims of tensors in a graph have one size, as far as their operations tell: those of a result, and those of what
it is made of."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import tensorflow as tf

Dim = tuple[tf.Tensor, int]  # a tensor, and one of its dims

_PLACE_OF_SIZES = {"Reshape": 1, "BroadcastTo": 1}  # type of operation -> its input that holds the sizes of its result
_PLACE_OF_SIZES |= dict.fromkeys(("Fill", "RandomStandardNormal", "RandomUniform", "TruncatedNormal"), 0)
_PLACE_OF_SIZES |= {f"Stateless{kind}V2": 0 for kind in ("RandomNormal", "RandomUniform", "TruncatedNormal")}
_BY_ELEMENT = (
    *("Identity", "Placeholder", "Cast", "StopGradient", "PreventGradient", "CheckNumerics", "ZerosLike", "OnesLike"),
    *("SelectV2", "AddV2", "AddN", "BiasAdd", "Mul", "Sub", "Neg", "RealDiv", "DivNoNan", "FloorMod", "Pow", "Maximum"),
    *("Minimum", "Abs", "Sign", "Exp", "Expm1", "Log", "Log1p", "Sqrt", "Rsqrt", "Square", "SquaredDifference", "Erf"),
    *("Tanh", "Sigmoid", "Relu", "Relu6", "LeakyRelu", "Elu", "Selu", "Softplus", "Softsign", "Sin", "Cos", "Round"),
    *("Greater", "GreaterEqual", "Less", "LessEqual", "Equal", "NotEqual", "LogicalAnd", "LogicalOr", "LogicalNot"),
)
_LIKE_THE_FIRST = ("Softmax", "LogSoftmax", "Cumsum", "ReverseV2")  # their result is as their first input
# Their rows are in the first dim of what they take and return.
_OF_BATCHES = (
    *("Conv2D", "Conv3D", "DepthwiseConv2dNative", "MaxPool", "MaxPool3D", "AvgPool", "AvgPool3D", "FusedBatchNormV3"),
    *("Pad", "PadV2", "MirrorPad", "ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic"),
)
_REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "Any", "All", "ArgMax", "ArgMin")


def made_of(op: tf.Operation) -> list[tf.Tensor]:
    """The tensors of which an operation makes its results, as far as graphs tell. What a branch takes from the graph
    outside is a placeholder in it."""
    if op.type != "Placeholder" or op.outputs[0].dtype == tf.resource:
        return list(op.inputs)
    captures = getattr(op.graph, "captures", ())
    return [outside for outside, inside in captures if inside is op.outputs[0] and hasattr(outside, "graph")]


def dims_asked(sizes: tf.Tensor) -> list[Dim]:
    """The dims of a tensor of which these are the sizes, taken from its shape; empty if they are something else."""
    op = sizes.op
    if op.type not in ("StridedSlice", "GatherV2", "Unpack") or op.inputs[0].op.type != "Shape":
        return []
    if op.type == "Unpack":
        return [(op.inputs[0].op.inputs[0], sizes.value_index)]
    tensor, given = op.inputs[0].op.inputs[0], [tf.get_static_value(each) for each in op.inputs[1:]]
    if tensor.shape.rank is None or any(each is None for each in given):
        return []
    places = given[0]
    if op.type == "StridedSlice":
        if places.shape != (1,):  # as with an ellipsis
            return []
        begin, end, step = (int(each[0]) for each in given)
        part = slice(None if op.get_attr("begin_mask") else begin, None if op.get_attr("end_mask") else end, step)
        places = begin if op.get_attr("shrink_axis_mask") else part
    return [(tensor, int(dim)) for dim in np.arange(tensor.shape.rank)[places].ravel()]


def dims_of_sizes(numbers: tf.Tensor) -> list[Dim | None]:
    """For each of some numbers, the dim of which it is the size; None for other numbers."""
    op = numbers.op
    if op.type in ("Pack", "ConcatV2"):
        parts = op.inputs if op.type == "Pack" else op.inputs[:-1]
        return [dim for part in parts for dim in dims_of_sizes(part)]
    return [*dims_asked(numbers)] or [None] * (numbers.shape.num_elements() or 0)


def same_dims(tensor: tf.Tensor, dim: int) -> list[Dim]:
    """The dims of other tensors of which this one is made, so that it has their size; empty if that is unknown."""
    op, rank = tensor.op, tensor.shape.rank
    if rank is None:
        return []
    if op.type == "Transpose":
        permutation = tf.get_static_value(op.inputs[1])
        return [] if permutation is None else [(op.inputs[0], int(permutation[dim]) % rank)]
    if op.type in _PLACE_OF_SIZES:
        sizes = dims_of_sizes(op.inputs[_PLACE_OF_SIZES[op.type]])
        return [size for size in sizes[dim : dim + 1] if size and len(sizes) == rank]
    if op.type in ("GatherV2", "ResourceGather"):
        in_front = not op.get_attr("batch_dims") and (len(op.inputs) == 2 or tf.get_static_value(op.inputs[2]) == 0)
        return [(op.inputs[1], dim)] if in_front and dim < (op.inputs[1].shape.rank or 0) else []
    if op.type in ("While", "StatelessWhile"):  # what it carries keeps its shape
        return [(op.inputs[tensor.value_index], dim)] if op.inputs[tensor.value_index].shape.rank == rank else []
    if op.type == "ConcatV2":
        axis = tf.get_static_value(op.inputs[-1])
        return [] if axis is None or dim == axis % rank else [(each, dim) for each in op.inputs[:-1]]
    if op.type in _REDUCTIONS:
        return _of_reduction(op, dim)
    if op.type == "Einsum":
        return _of_letters(op, dim)
    if op.type in ("BatchMatMulV2", "MatMul"):
        return _of_product(op, dim, rank)
    if op.type == "StridedSlice":
        return _of_slice(op, dim)
    if op.type == "Squeeze" and (gone := op.get_attr("squeeze_dims")):
        kept = [place for place in range(rank + len(gone)) if place not in {axis % (rank + len(gone)) for axis in gone}]
        return [(op.inputs[0], kept[dim])]
    if op.type in ("ExpandDims", "Split", "SplitV"):
        return _beside_an_axis(op, dim, rank)
    if op.type in _LIKE_THE_FIRST or (op.type in _OF_BATCHES and dim == 0):
        return [(op.inputs[0], dim)]
    if op.type.startswith("CudnnRNN") and (dim == 1 or (dim == 0 and tensor.value_index == 0)):
        return [(op.inputs[0], dim)]  # [steps, rows, ..]; its states are [layers, rows, ..]
    if op.type not in _BY_ELEMENT or any(each.shape.rank is None for each in made_of(op)):
        return []
    return _of_the_widest(made_of(op), dim, rank)


def _of_the_widest(tensors: Iterable[tf.Tensor], dim: int, rank: int) -> list[Dim]:
    """The dims of operands that make a dim of a result of this rank: tensors are repeated along dims of size 1."""
    alike = [(each, dim - rank + each.shape.rank) for each in tensors if dim >= rank - each.shape.rank]
    return [(each, place) for each, place in alike if each.shape[place] != 1] or alike


def _of_reduction(op: tf.Operation, dim: int) -> list[Dim]:
    """same_dims of a sum, mean and the like."""
    tensor, axes = op.inputs[0], tf.get_static_value(op.inputs[1])
    if axes is None or tensor.shape.rank is None:
        return []
    gone = {int(axis) % tensor.shape.rank for axis in np.ravel(axes)}
    if not op.type.startswith("Arg") and op.get_attr("keep_dims"):
        return [] if dim in gone else [(tensor, dim)]
    return [(tensor, [place for place in range(tensor.shape.rank) if place not in gone][dim])]


def _of_product(op: tf.Operation, dim: int, rank: int) -> list[Dim]:
    """same_dims of a product of matrices."""
    one, other = op.inputs
    names = ("adj_x", "adj_y") if op.type == "BatchMatMulV2" else ("transpose_a", "transpose_b")
    turned = [op.get_attr(name) for name in names]
    if one.shape.rank is None or other.shape.rank is None:
        return []
    if dim == rank - 2:
        return [(one, one.shape.rank - (1 if turned[0] else 2))]
    if dim == rank - 1:
        return [(other, other.shape.rank - (2 if turned[1] else 1))]
    return _of_the_widest((one, other), dim, rank)


def _beside_an_axis(op: tf.Operation, dim: int, rank: int) -> list[Dim]:
    """same_dims of an operation that adds one axis, or cuts along one."""
    given = {"ExpandDims": (0, 1), "Split": (1, 0), "SplitV": (0, 2)}[op.type]  # places of the tensor, and of the axis
    tensor, axis = op.inputs[given[0]], tf.get_static_value(op.inputs[given[1]])
    if axis is None or dim == (axis := int(np.ravel(axis)[0]) % rank):
        return []
    return [(tensor, dim - 1 if op.type == "ExpandDims" and dim > axis else dim)]


def _of_letters(op: tf.Operation, dim: int) -> list[Dim]:
    """same_dims of an Einsum."""
    equation = op.get_attr("equation").decode()
    if "." in equation:
        return []
    taken, _, made = equation.replace(" ", "").partition("->")
    found = [(each, letters.find(made[dim])) for each, letters in zip(op.inputs, taken.split(","), strict=True)]
    return [(each, place) for each, place in found if place >= 0]


def _of_slice(op: tf.Operation, dim: int) -> list[Dim]:
    """same_dims of a slice: dims of which it takes all."""
    tensor, steps = op.inputs[0], tf.get_static_value(op.inputs[3])
    begin, end, ellipsis, new, gone = (
        [op.get_attr(f"{name}_mask") >> bit & 1 for bit in range(32)]
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    )
    if tensor.shape.rank is None or steps is None:
        return []
    count, taken = len(steps), 0
    made: list[tuple[int | None, bool]] = []  # of each dim of the result: the one taken, and whether all of it is
    others = tensor.shape.rank - sum(not ellipsis[bit] and not new[bit] for bit in range(count))
    for bit in range(count):
        if ellipsis[bit] or new[bit]:
            made += [(taken + more, True) for more in range(others)] if ellipsis[bit] else [(None, False)]
            taken += others if ellipsis[bit] else 0
        else:
            made += [] if gone[bit] else [(taken, bool(begin[bit] and end[bit] and steps[bit] == 1))]
            taken += 1
    made += [(place, True) for place in range(taken, tensor.shape.rank)]
    place, is_whole = made[dim]
    return [(tensor, place)] if is_whole and place is not None else []
