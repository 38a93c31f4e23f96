"""What operations of a graph do with the rows of a batch, one rule for each kind of operation.

A tensor is FREE (the same whatever the rows), SIZES (computed from the number of rows), Rows, or MIXED: anything else.
`Rows(axis, each)`: for n rows it has n * each places along `axis`, and each group of `each` consecutive places depends
on one row alone. The output of an operation without a rule is MIXED. See row_proof.py.

The rule of broadcasting, which many operations share, is NumPy's: dims are aligned from the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf


class Rows(NamedTuple):
    axis: int
    each: int


FREE, SIZES, MIXED = "free", "sizes", "mixed"
Kind = Rows | str
Rule = Callable[[tf.Operation, Sequence[Kind], int], Kind]  # (operation, its inputs, rows of the batch) -> its outputs

RULES: dict[str, Rule] = {}


def of(types: str) -> Callable[[Rule], Rule]:
    """Decorator that registers a function as the rule of operations of these types, separated by spaces."""

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(types.split(), rule))
        return rule

    return register


def shape_of(tensor: tf.Tensor) -> list[int] | None:
    """Returns the shape as a list; None if a dim is unknown."""
    sizes = tensor.shape.as_list() if tensor.shape.rank is not None else [None]
    return None if None in sizes else [size for size in sizes if size is not None]


def rank_of(tensor: tf.Tensor) -> int:
    return len(tensor.shape)


def constant(operation: tf.Operation, place: int) -> np.ndarray | None:
    """Returns the value of a parameter input, such as an axis, if it is known without running anything."""
    return tf.get_static_value(operation.inputs[place])


def axis_of(operation: tf.Operation, place: int, rank: int) -> int | None:
    value = constant(operation, place)
    return None if value is None else int(value) % rank


def has_zero_factor(product: tf.Operation) -> bool:
    factors = [constant(product, place) for place, each in enumerate(product.inputs) if each.op.type == "Const"]
    return any(factor is not None and not np.any(factor) for factor in factors)


def agreed(kinds: Iterable[Kind | None]) -> Kind:
    """Returns the kind of all inputs that have rows, if it is the same; else MIXED. None: an input without rows."""
    found = {kind for kind in kinds if kind is not None}
    return found.pop() if len(found) == 1 else MIXED


def only(kinds: Sequence[Kind], place: int) -> Rows | None:
    """Returns the kind of an input, if it has rows and all others are FREE."""
    kind = kinds[place]
    others = all(other == FREE for number, other in enumerate(kinds) if number != place)
    return kind if isinstance(kind, Rows) and others else None


def are_rows_or_free(kinds: Iterable[Kind]) -> bool:
    return all(kind == FREE or isinstance(kind, Rows) for kind in kinds)


# -- element by element ------------------------------------------------------------------------------------------------


@of(
    """
    Abs Acos Acosh Asin Asinh Atan Atan2 Atanh Cast Ceil CheckNumerics ClipByValue Cos Cosh Digamma Elu
    EnsureShape Erf Erfc Erfinv Exp Expm1 Floor Identity Imag Inv Invert IsFinite IsInf IsNan LeakyRelu
    Lgamma Log Log1p LogicalNot Ndtri Neg OnesLike PreventGradient Real Reciprocal Relu Relu6 Rint Round
    Rsqrt Selu Sigmoid Sign Sin Sinh Snapshot Softplus Softsign Sqrt Square StopGradient Tan Tanh
    ZerosLike Add AddN AddV2 ApproximateEqual BitwiseAnd BitwiseOr BitwiseXor Complex Div DivNoNan Equal
    FloorDiv FloorMod Greater GreaterEqual Less LessEqual LogicalAnd LogicalOr Maximum Minimum Mod Mul
    MulNoNan NotEqual Pow RealDiv SelectV2 SquaredDifference Sub TruncateDiv TruncateMod Xdivy Xlog1py
    Xlogy BroadcastTo
    """
)
def elementwise(operation: tf.Operation, kinds: Sequence[Kind], rows: int) -> Kind:
    """The rule of operations that broadcast their inputs. A dim of n * each does not fit a FREE input, whose dims are
    the same for any n."""
    if operation.type == "BroadcastTo":
        kinds = kinds[:1]
    if not are_rows_or_free(kinds):
        return MIXED
    rank = rank_of(operation.outputs[0])
    return agreed(
        kind._replace(axis=kind.axis + rank - rank_of(tensor)) if isinstance(kind, Rows) else None
        for kind, tensor in zip(kinds, operation.inputs, strict=False)
    )


@of("Select")
def _select(operation: tf.Operation, kinds: Sequence[Kind], rows: int) -> Kind:
    """The rule of the older Select, which does not broadcast."""
    are_alike = len({rank_of(tensor) for tensor in operation.inputs}) == 1
    return elementwise(operation, kinds, rows) if are_alike else MIXED


@of("BiasAdd")
def _bias_add(operation: tf.Operation, kinds: Sequence[Kind], rows: int) -> Kind:
    x = only(kinds, 0)
    channels = 1 if operation.get_attr("data_format") == b"NCHW" else rank_of(operation.inputs[0]) - 1
    return x if x and x.axis != channels else MIXED


# -- products ----------------------------------------------------------------------------------------------------------


@of("MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3")
def _product(operation: tf.Operation, kinds: Sequence[Kind], rows: int) -> Kind:
    if not are_rows_or_free(kinds):
        return MIXED
    names = ("transpose_a", "transpose_b") if operation.type == "MatMul" else ("adj_x", "adj_y")
    rank, found = rank_of(operation.outputs[0]), []
    for side, (kind, tensor, name) in enumerate(zip(kinds, operation.inputs, names, strict=True)):
        if not isinstance(kind, Rows):
            continue
        of_matrix = kind.axis - (rank_of(tensor) - 2)  # 0 or 1; negative: rows lie along a batch dim of the matrices
        kept = side ^ int(operation.get_attr(name))
        if of_matrix >= 0 and of_matrix != kept:
            return MIXED  # summed up
        found.append(kind._replace(axis=kind.axis + rank - rank_of(tensor) if of_matrix < 0 else rank - 2 + side))
    return agreed(found)


@of("Einsum")
def _einsum(operation: tf.Operation, kinds: Sequence[Kind], rows: int) -> Kind:
    equation = operation.get_attr("equation").decode().replace(" ", "")
    if "." in equation or "->" not in equation or not are_rows_or_free(kinds):
        return MIXED
    terms, result = equation.split("->")
    found = []
    for kind, term in zip(kinds, terms.split(","), strict=True):
        if isinstance(kind, Rows):
            letter = term[kind.axis]
            if result.count(letter) != 1 or term.count(letter) != 1:
                return MIXED
            found.append(kind._replace(axis=result.index(letter)))
    return agreed(found)


@of(
    """
    Conv2D Conv3D DepthwiseConv2dNative AvgPool AvgPool3D MaxPool MaxPool3D LRN ResizeArea ResizeBicubic
    ResizeBilinear ResizeNearestNeighbor DepthToSpace SpaceToDepth
    """
)
def _each_image(operation: tf.Operation, kinds: Sequence[Kind], rows: int) -> Kind:
    x = only(kinds, 0)
    if operation.type.startswith(("Avg", "Max")) and operation.get_attr("ksize")[0] != 1:
        return MIXED
    return x if x and x.axis == 0 else MIXED


@of("Conv2DBackpropInput Conv3DBackpropInputV2")
def _transposed_convolution(operation: tf.Operation, kinds: Sequence[Kind], rows: int) -> Kind:
    sizes, kernel, x = kinds
    fits = sizes in (FREE, SIZES) and kernel == FREE and isinstance(x, Rows) and x.axis == 0
    return x if fits else MIXED


# -- along an axis -----------------------------------------------------------------------------------------------------


@of("All Any EuclideanNorm Max Mean Min Prod Sum")
def _reduction(operation: tf.Operation, kinds: Sequence[Kind], rows: int) -> Kind:
    x, axes, rank = only(kinds, 0), constant(operation, 1), rank_of(operation.inputs[0])
    if x is None or axes is None:
        return MIXED
    gone = {int(axis) % rank for axis in np.ravel(axes)}
    if x.axis in gone:
        zeros = constant(operation, 0) if operation.type == "Sum" else None  # the sum of any number of zeros is 0
        return MIXED if zeros is None or np.any(zeros) else FREE
    return x if operation.get_attr("keep_dims") else x._replace(axis=x.axis - sum(axis < x.axis for axis in gone))


@of("ArgMax ArgMin")
def _place_of_largest(operation: tf.Operation, kinds: Sequence[Kind], rows: int) -> Kind:
    x, axis = only(kinds, 0), axis_of(operation, 1, rank_of(operation.inputs[0]))
    if x is None or axis is None or axis == x.axis:
        return MIXED
    return x._replace(axis=x.axis - (axis < x.axis))


@of("LogSoftmax Softmax TopKV2")
def _last_axis(operation: tf.Operation, kinds: Sequence[Kind], rows: int) -> Kind:
    x = only(kinds, 0)
    return x if x and x.axis != rank_of(operation.inputs[0]) - 1 else MIXED


@of("Cumprod Cumsum ReverseV2 Roll")
def _along_axes(operation: tf.Operation, kinds: Sequence[Kind], rows: int) -> Kind:
    """The rule of operations along axes, which the last input names."""
    x, axes, rank = only(kinds, 0), constant(operation, len(kinds) - 1), rank_of(operation.inputs[0])
    if x is None or axes is None or x.axis in {int(axis) % rank for axis in np.ravel(axes)}:
        return MIXED
    return x


@of("MatrixBandPart MatrixDiagPartV3 MatrixDiagV3 MatrixSetDiagV3")
def _each_matrix(operation: tf.Operation, kinds: Sequence[Kind], rows: int) -> Kind:
    x = only(kinds, 0)
    matrix = 1 if operation.type == "MatrixDiagV3" else 2
    return x if x and x.axis < rank_of(operation.inputs[0]) - matrix else MIXED


@of("FusedBatchNormV3")
def _batch_norm(operation: tf.Operation, kinds: Sequence[Kind], rows: int) -> Kind:
    x = only(kinds, 0)
    return x if x and x.axis == 0 and not operation.get_attr("is_training") else MIXED
