"""Private parts of Keras' layers: nested layers, variables, losses, and how layers are called.

Keras has no public way to a layer that is an attribute of another layer (`model.layers` is the first level only), nor
to what a layer owns without its nested layers.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras.src.backend.common.global_state import get_global_attribute, set_global_attribute
from keras.src.layers.rnn.dropout_rnn_cell import DropoutRNNCell
from keras.src.models.functional import Functional
from keras.src.ops.core import Cast
from keras.src.ops.nn import Softmax

from tfdist.compat.temporary_attributes import attribute_replaced


def all_layers(model: keras.Layer, include_self: bool = True) -> list[keras.Layer]:
    """The model's layers at any depth, each once. Relies on `Layer._flatten_layers`; without it no layer is found that
    has to be synchronized, cut, sharded or refused.
    """
    return model._flatten_layers(include_self=include_self)


def holds_cells(layer: keras.Layer) -> bool:
    """Whether the layer itself calls cells of an RNN, which may keep their dropout masks between calls. Relies on
    keras.src's `DropoutRNNCell` and on `Layer._layers`; without them ZeRO-3 draws other masks in the backward pass."""
    cells = DropoutRNNCell | keras.layers.StackedRNNCells
    return isinstance(layer, keras.layers.RNN) or any(isinstance(inner, cells) for inner in layer._layers)


def all_built(model: keras.Layer) -> bool:
    """Whether the model and its layers at any depth are built."""
    return all(layer.built for layer in all_layers(model))


def stateful_layer(model: keras.Layer) -> keras.Layer | None:
    """The first layer that carries the state of row i of a batch over to row i of the next, as an RNN may, or None."""
    return next((layer for layer in all_layers(model) if getattr(layer, "stateful", False)), None)


def inputs_of(layer: keras.Layer) -> list[keras.KerasTensor]:
    """Symbolic tensors with which the layer was called. Relies on `Layer._inbound_nodes`; without it the sample that
    looks up a missing row is not named.
    """
    return [tensor for node in getattr(layer, "_inbound_nodes", ()) for tensor in node.input_tensors]


def softmaxes_cast(model: keras.Model) -> list[tuple[Any, str]]:
    """The softmaxes of a functional model whose result goes to one cast and nowhere else, each with the dtype of that
    cast. Relies on `Functional.operations`, `Operation._inbound_nodes` and the classes of `ops.softmax` and `ops.cast`;
    without them none is found.
    """
    if not isinstance(model, Functional):
        return []
    takers: dict[int, list[Any]] = {}
    for operation in model.operations:
        for node in operation._inbound_nodes:
            for tensor in node.input_tensors:
                takers.setdefault(id(tensor), []).append(operation)
    results = {id(tensor) for tensor in keras.tree.flatten(model.outputs)}
    found = []
    for operation in model.operations:
        outputs = [tensor for node in operation._inbound_nodes for tensor in node.output_tensors]
        if type(operation) is Softmax and len(outputs) == 1 and id(outputs[0]) not in results:
            mine = takers.get(id(outputs[0]), [])
            if len(mine) == 1 and type(mine[0]) is Cast:
                found.append((operation, mine[0].dtype))
    return found


def has_own_call(model: keras.Model) -> bool:
    """Whether the model computes something else than its graph of layers, or has no such graph. Relies on
    `Functional.call`; without it the work that a subclass does around its layers would be left out when the layers are
    cut.
    """
    return "call" in vars(model) or class_has_own_call(type(model))


def has_no_call(model: keras.Model) -> bool:
    """Whether the model itself cannot be called: its steps call models inside it, as those of a GAN do."""
    return type(model).call is keras.Model.call


def class_has_own_call(kind: type[keras.Model]) -> bool:
    """Whether the class has a `call` of its own, even if one instance's `call` is replaced. Relies on
    `Functional.call`."""
    return kind.call not in (Functional.call, keras.Sequential.call) or kind.__call__ is not keras.Layer.__call__


def own_trainable_variables(layer: keras.Layer) -> list[keras.Variable]:
    """The trainable variables of the layer, without those of nested layers. Relies on `Layer._trainable_variables`, a
    list that Keras' tracker fills; without it ZeRO-3 does not know which layer gathers a variable."""
    return layer._trainable_variables


def own_non_trainable_variables(layer: keras.Layer) -> list[keras.Variable]:
    """The other variables of the layer, without those of nested layers and seed generators. Relies on
    `Layer._non_trainable_variables`, a list that Keras' tracker fills; without it an error cannot name the layer that
    sets its state where it may not."""
    return layer._non_trainable_variables


def own_seed_generators(layer: keras.Layer) -> list[keras.random.SeedGenerator]:
    """The layer's own seed generators. Relies on `Layer._seed_generators`; without it generators are broadcast once
    more at their first use."""
    return layer._seed_generators


def recorded_losses(layer: keras.Layer) -> list[Any]:
    """The losses that `add_loss` has recorded since the record was cleared; in a stateless scope, those in the scope.
    Relies on `Layer._get_own_losses`; without it losses that a model adds cover only this worker's rows, and are not
    summed."""
    return list(layer._get_own_losses())


def record_losses(layer: keras.Layer, losses: Sequence[Any]) -> None:
    """Replaces the losses that the layer has recorded. Relies on `Layer._losses`, a list, `Layer._loss_ids`, a set, and
    on `StatelessScope.losses`. Sets no slice of `_losses`: TensorFlow's wrapper of lists would compare the tensors."""
    scope = get_global_attribute("stateless_scope")
    layer._losses.clear()
    if scope is None:
        layer._losses.extend(losses)
    elif scope.collect_losses:
        scope.losses[:] = [loss for loss in scope.losses if id(loss) not in layer._loss_ids]
        scope.losses.extend(losses)
        layer._loss_ids.update(map(id, losses))


def loss_records(layer: keras.Layer) -> tuple[Any, Any]:
    """Returns the layer's containers (losses, their ids); None for one that it does not have. Relies on
    `Layer._losses`, a list, and `Layer._loss_ids`, a set, both in the instance.
    """
    return layer.__dict__.get("_losses"), layer.__dict__.get("_loss_ids")


def set_loss_records(layer: keras.Layer, losses: Any, loss_ids: Any) -> None:
    """Replaces both containers of `loss_records`. Without these names the replicas of one process mix their losses."""
    layer.__dict__.update(_losses=losses, _loss_ids=loss_ids)


def takes_training(layer: keras.Layer) -> bool:
    """Whether the layer's call has an argument `training`. Relies on `Layer._call_has_training_arg`; without it layers
    are tried as in inference, and a random loss of theirs cannot be judged.
    """
    return getattr(layer, "_call_has_training_arg", False)


def stored_kernel(layer: keras.Layer) -> keras.Variable:
    """The variable of a Dense or EinsumDense layer, where `layer.kernel` may be computed from it. Relies on `_kernel`;
    without it these layers cannot be cut for the `model` and `expert` axes.
    """
    return layer._kernel


def stored_embeddings(layer: keras.Layer) -> keras.Variable:
    """The table of an Embedding layer, likewise. Relies on `_embeddings`."""
    return layer._embeddings


def is_inside_a_call() -> bool:
    """Whether some layer is being called. Relies on the global attribute "current_call_ctx"; without it a weight that a
    layer sets in its forward pass goes unnoticed, and a copy of it would be trained.
    """
    return get_global_attribute("current_call_ctx") is not None


@contextlib.contextmanager
def _with_call(context: Any) -> Iterator[None]:
    """Context manager in which another object says what layers were told."""
    around = get_global_attribute("current_call_ctx")
    set_global_attribute("current_call_ctx", context)
    try:
        yield
    finally:
        set_global_attribute("current_call_ctx", around)


def outside_the_call() -> contextlib.AbstractContextManager[None]:
    """Context manager in which a model can be called as if no layer were being called. Relies on the same attribute;
    without it a model that is tried during a call ends that call, and the layers after it take training for inference.
    """
    return _with_call(None)


@contextlib.contextmanager
def in_the_call_as_it_is() -> Iterator[None]:
    """Context manager in which layers can be called as part of the current call, whose state is restored at exit: a
    layer that is told whether it is training tells the layers after it. Relies on the same attribute, an object that
    holds what layers were told; without it the later layers take training for inference."""
    around = get_global_attribute("current_call_ctx")
    attributes = dict(vars(around)) if around is not None else {}
    try:
        yield
    finally:
        if around is not None:
            vars(around).clear()
            vars(around).update(attributes)
        set_global_attribute("current_call_ctx", around)


def current_call() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns a function that makes context managers in which layers are called as part of the call that is current
    now, also when it is over. Relies on the same attribute, an object that holds what layers were told; without it
    layers inside a recomputed layer take training for inference in the backward pass."""
    kept = copy.copy(get_global_attribute("current_call_ctx"))
    return lambda: _with_call(copy.copy(kept))


def is_training(given: Any) -> bool:
    """Whether the current call is one of training. given: its argument `training`, if it has one. Relies on the same
    attribute, which has `training` if a caller has set it; without it losses that are added in training are judged by
    their values in evaluation.
    """
    return bool(getattr(get_global_attribute("current_call_ctx"), "training", False) if given is None else given)


def keep_message(error: Exception) -> Exception:
    """Returns the error, marked so that Keras does not add its own words to the message. Relies on
    `_keras_call_info_injected`; without it the message is longer, and nothing else changes.
    """
    error._keras_call_info_injected = True  # pyright: ignore[reportAttributeAccessIssue] - how Keras marks errors
    return error


@contextlib.contextmanager
def in_float32(layers: Sequence[keras.Layer]) -> Iterator[None]:
    """Context manager in which layers whose policy is to compute in half precision compute in float32. Relies on
    `Layer._dtype_policy`; without it they compute as usual."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            policy = getattr(layer, "_dtype_policy", None)
            if type(policy) is keras.DTypePolicy and policy.compute_dtype in ("float16", "bfloat16"):
                stack.enter_context(attribute_replaced(layer, "_dtype_policy", keras.DTypePolicy("float32")))
        yield
