"""python -m tfdist.training.model_cost FLAGS: the cost of training a model, read from its graph; nothing is computed.

The model is built without memory (in Keras' stateless scope a variable is a shape and an initializer), one forward and
backward pass is traced for two batch sizes, and the two graphs are compared. The result is printed as JSON, in the form
that planner/shapes.py reads:

  {"name", "tokens": per sample, "parts": [{"name", "weights": [[path, shape]], "constants": elements that are not
    trained, "flops": per sample, "is_counted", "saved": [bytes], "fixed": bytes, "output": bytes}]}

tokens: 1 if samples are no sequences. flops: floating-point operations of the forward pass, of products and
convolutions only (a multiplication and an addition count as two). is_counted: false if the part has more of them, whose
number the graph does not tell: in a loop (recurrent layers), by cuDNN, or of unknown shapes; flops, saved and fixed are
then too low. saved: the tensors that the forward pass leaves for the backward pass, bytes per sample, one number for
each tensor; fixed: the same, but independent of the batch size (weights cast to the compute type, masks). output: bytes
per sample that the part hands on, an upper bound. There is one part per layer of the model, in its order.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tfdist.compat.tensorflow_graphs import graph_called_by, inputs_of, kinds_called_by, operations_behind

# Views: they share their input's memory.
_VIEWS = {"Identity", "Reshape", "ExpandDims", "Squeeze", "StopGradient", "PreventGradient", "IdentityN"}
# Operations that use only the shape of their inputs; the compiler replaces them with constants.
_SHAPES_ONLY = {"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike", "BroadcastGradientArgs"}
_PRODUCTS = {
    "MatMul",
    "BatchMatMulV2",
    "BatchMatMul",
    "Conv2D",
    "DepthwiseConv2dNative",
    "Conv1D",
    "Conv3D",
    "Einsum",
    # Transposed convolutions.
    "Conv2DBackpropInput",
    "Conv3DBackpropInputV2",
    "DepthwiseConv2dNativeBackpropInput",
}
_SIZES = (2, 4)  # samples in the two traces


def trace(model: Any, objective: Any, specs: tuple, batch: int) -> dict[str, dict[str, Any]]:
    """Returns {layer name: {"flops", "saved": {tensor name: bytes}, "output": bytes}} of one forward and backward pass.

    model: a Keras model, which may be without memory. specs: (x, y) or (x, y, w) nests of one sample's TensorSpec.
    """
    import tensorflow as tf

    from tfdist.training.stateless_call import stateless_call

    graph = tf.Graph()
    with graph.as_default():

        def placeholder(spec: tf.TensorSpec) -> tf.Tensor:
            return tf.compat.v1.placeholder(spec.dtype, (batch, *spec.shape))

        values = [
            [tf.compat.v1.placeholder(variable.dtype, variable.shape) for variable in group]
            for group in (model.trainable_variables, model.non_trainable_variables)
        ]
        x, y = (tf.nest.map_structure(placeholder, spec) for spec in specs[:2])
        w = placeholder(specs[2]) if len(specs) == 3 else tf.ones([batch])
        inputs = set(graph.get_operations())
        trainable, non_trainable = values
        output = stateless_call(model, trainable, non_trainable, x, training=True).outputs
        in_model = set(graph.get_operations())
        scores = objective(output, y, w)
        loss = tf.reduce_sum(scores.losses * scores.weights)
        forward = set(graph.get_operations())
        gradients = [gradient.op for gradient in tf.gradients(loss, values[0]) if gradient is not None]
        # TensorFlow prunes what these do not depend on, such as the gradients of constants.
        needed = set(operations_behind(gradients, lambda op: [*inputs_of(op), *op.control_inputs]))
    parts = {
        name: {"flops": 0.0, "is_counted": True, "saved": {}, "output": 0}
        for name in [*(layer.name for layer in model.layers), "loss"]
    }
    _fill(parts, [op for op in graph.get_operations() if op in forward or op in needed], inputs, in_model, forward)
    return parts


def _fill(parts: dict[str, dict[str, Any]], operations: list, inputs: set, in_model: set, forward: set) -> None:
    owner, name = {}, next(iter(parts))
    for operation in operations:
        if operation in forward:
            # Plain operations between two layers count with the layer before them.
            name = _layer_of(operation.name, parts) or name if operation in in_model else "loss"
            owner[operation] = parts[name]
            flops = _flops(operation)
            parts[name]["flops"] += flops or 0.0
            parts[name]["is_counted"] &= flops is not None
            if operation.outputs and operation not in inputs:
                parts[name]["output"] = _bytes(operation.outputs[0])
            continue
        for tensor in operation.inputs if operation.type not in _SHAPES_ONLY else ():
            root = _memory_of(tensor)
            if root.op in forward and root.op not in inputs and root.op.type not in ("Const", *_SHAPES_ONLY):
                owner[root.op]["saved"][root.name] = _bytes(root)


def _layer_of(name: str, layers: dict[str, Any]) -> str | None:
    """Returns the layer in whose scope an operation is. TensorFlow numbers scopes that are entered again: dense_1 for
    dense."""
    pieces = [re.sub(r"_\d+$", "", piece) for piece in name.split("/")] + name.split("/")
    return next((piece for piece in pieces if piece in layers), None)


def _memory_of(tensor: Any) -> Any:
    while tensor.op.type in _VIEWS:
        tensor = tensor.op.inputs[0]
    return tensor


def _bytes(tensor: Any) -> int:
    return math.prod(tensor.shape.as_list()) * tensor.dtype.size if tensor.shape.is_fully_defined() else 0


def _flops(operation: Any) -> float | None:
    """Returns 2 x multiplications of the products and convolutions in an operation; None if the graph does not tell
    their number."""
    kind = operation.type
    if kind in _PRODUCTS:
        tensors = (*operation.inputs, *operation.outputs)
        shapes: Any = [[None] if tensor.shape.rank is None else tensor.shape.as_list() for tensor in tensors]
        # A transposed convolution has as many as the convolution from its result to its input; inputs[0] is a shape.
        shapes = [shapes[2], shapes[1], shapes[2]] if "Backprop" in kind else shapes
        if any(size is None for shape in shapes for size in shape):
            return None
        return 2.0 * _multiplications(operation, shapes)
    if called := graph_called_by(operation):
        inside = [_flops(each) for each in called.graph.get_operations()]
        return None if None in inside else sum(filter(None, inside))
    kinds = kinds_called_by(operation)  # of a loop, a branch
    return None if kind.startswith("CudnnRNN") or kinds & _PRODUCTS else 0.0


def _multiplications(operation: Any, shapes: Sequence[Sequence[int]]) -> int:
    kind, kernel, result = operation.type, shapes[1], math.prod(shapes[-1])
    if kind == "MatMul":
        return result * shapes[0][0 if operation.get_attr("transpose_a") else 1]
    if kind.startswith("BatchMatMul"):
        return result * shapes[0][-2 if operation.get_attr("adj_x") else -1]
    if kind == "Einsum":
        terms, out = operation.get_attr("equation").decode().split("->")
        sizes = {
            letter: size
            for term, shape in zip(terms.split(","), shapes, strict=False)
            for letter, size in zip(term, shape, strict=False)
        }
        return result * math.prod(size for letter, size in sizes.items() if letter not in out)
    return result * math.prod(kernel[:2] if kind.startswith("Depthwise") else kernel[:-1])


def forward_flops(model: Any, x_spec: Any, rows: int = 1) -> float:
    """Returns the floating-point operations of the forward pass of one sample: products and convolutions. 0 if the
    graph does not tell their number (recurrent layers).

    Traces it once, runs nothing. rows: rows of the traced batch (a model may accept no other number).
    """
    import tensorflow as tf

    spec = tf.nest.map_structure(lambda each: tf.TensorSpec([rows, *each.shape], each.dtype), x_spec)
    traced = tf.function(lambda x: model(x, training=False), autograph=False).get_concrete_function(spec)
    found = [_flops(operation) for operation in traced.graph.get_operations()]
    return 0.0 if None in found else sum(filter(None, found)) / rows


def tokens_of(x_spec: Any) -> int:
    """Returns the number of tokens of a sample: the length of x if it is one vector of integers, else 0."""
    import tensorflow as tf

    is_text = isinstance(x_spec, tf.TensorSpec) and x_spec.dtype.is_integer and len(x_spec.shape) == 1
    return (x_spec.shape.num_elements() or 0) if is_text else 0


def count(model: Any, objective: Any, specs: tuple) -> dict[str, Any]:
    """Counts weights, FLOPs and saved tensors of a model, as described at the top of this file."""
    fewer, more = (trace(model, objective, specs, batch) for batch in _SIZES)
    step = _SIZES[1] - _SIZES[0]
    weights, constants = defaultdict(list), defaultdict(int)
    for variable in model.variables:
        name = next((piece for piece in variable.path.split("/") if piece in fewer), "loss")
        if any(variable is trained for trained in model.trainable_variables):
            weights[name].append([variable.path, list(variable.shape)])
        else:
            constants[name] += math.prod(variable.shape)
    parts = []
    for name in fewer:
        per_sample = {
            tensor: (more[name]["saved"].get(tensor, size) - size) / step
            for tensor, size in fewer[name]["saved"].items()
        }
        fixed = sum(size - _SIZES[0] * per_sample[tensor] for tensor, size in fewer[name]["saved"].items())
        parts.append(
            {
                "name": name,
                "weights": weights[name],
                "constants": constants[name],
                "flops": (more[name]["flops"] - fewer[name]["flops"]) / step,
                "is_counted": fewer[name]["is_counted"],
                "saved": [size for size in per_sample.values() if size],
                "fixed": fixed,
                "output": (more[name]["output"] - fewer[name]["output"]) / step,
            }
        )
    return {
        "name": model.name,
        "tokens": tokens_of(specs[0]) or 1,
        "parts": [part for part in parts if part["weights"] or part["flops"] or part["saved"] or part["fixed"]],
    }


def main(argv: list[str]) -> int:
    """Counts the cost of the model that the training flags `argv` describe, and prints it as JSON."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import keras

    from tfdist import flags
    from tfdist.data.sources.load_split import data_here, load_split
    from tfdist.models.build_model import build_model
    from tfdist.training.objectives import make_objective
    from tfdist.training.precision import set_policy

    config = flags.parse(argv).config.replace(sync_batchnorm=False)  # the same memory, and no collectives in the graph
    split = load_split(data_here(config), "train")
    set_policy(config.precision)
    # Never exited: on exit, Keras would allocate the variables' memory.
    keras.StatelessScope().__enter__()
    model = build_model(config.model, split.element_spec[0], split.num_classes)
    print(json.dumps(count(model, make_objective(config.model, split.element_spec[1]), split.element_spec)))
    return 0


if __name__ == "__main__":
    from tfdist.control import exit_codes

    exit_codes.run_command(main, sys.argv[1:])
