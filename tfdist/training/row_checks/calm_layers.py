"""Changes layers for the time of a trial: added losses are recorded, and Keras' own layers do not mix rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras

from tfdist.compat import keras_batch_norm, keras_layers
from tfdist.compat.code_origin import is_of_keras, module_of, package_of
from tfdist.compat.temporary_attributes import attribute_replaced

_INITIALIZER = "_initializer"  # the names of functions that Keras' layers call before the first step end with this
_OF_EACH_LAYER = ("build", "quantize")  # functions that Keras puts into each layer
_ACTIVATIONS = "keras.src.activations."
_OF_WEIGHTS = (_INITIALIZER, "_constraint", "_regularizer")  # functions that see no rows


@contextlib.contextmanager
def calmed(layers: Sequence[keras.Layer], added: Callable[[int, Any], None]) -> Iterator[None]:
    """Context manager in which each loss that a layer adds goes to `added` with the layer's number, and Keras' own
    layers draw no random numbers and do not mix rows."""
    with contextlib.ExitStack() as stack:
        for number, layer in enumerate(layers):
            for name, function in {"add_loss": _reporting(added, number), **_calming(layer)}.items():
                stack.enter_context(attribute_replaced(layer, name, function))
        yield


def _reporting(added: Callable[[int, Any], None], number: int) -> Callable:
    def add_loss(loss: Any) -> None:
        for each in keras.tree.flatten(loss):
            added(number, each)

    return add_loss


def has_own_code(model: keras.Model) -> bool:
    """Returns whether the model has layers of the user's own, or layers that hold a user's function, except
    initializers."""
    layers = keras_layers.all_layers(model)
    return any(
        package_of(type(layer).__module__) not in ("keras", "tfdist") or holds_own_function(layer, _INITIALIZER)
        for layer in layers
    )


def holds_own_function(layer: keras.Operation, but: str | tuple[str, ...] = _OF_WEIGHTS) -> bool:
    """Returns whether a layer has an attribute that is a user's function (activation, Lambda). but: endings of names
    to ignore."""
    return any(
        callable(value) and not isinstance(value, type) and not _is_from_keras(value) and not name.endswith(but)
        for name, value in vars(layer).items()
    )


def _is_from_keras(function: Any) -> bool:
    """Returns whether a function (and, for a method, also its object) is from Keras or tfdist."""
    bound_to = getattr(function, "__self__", None)
    modules = [module_of(function)] if bound_to is None else [module_of(function), type(bound_to).__module__]
    return all(package_of(each) in ("keras", "tfdist") for each in modules)


def is_the_same_in_training(model: keras.Model) -> bool:
    """Returns whether, within `calmed`, a model computes the same in training as in inference: it consists of Keras'
    own code only."""
    layers = keras_layers.all_layers(model)
    operations = [each for layer in layers for each in getattr(layer, "operations", ())]
    return not any(
        not is_of_keras(each) or holds_own_function(each) or "call" in vars(each) or _holds_method(each)
        for each in (*layers, *operations)
    )


def _holds_method(layer: keras.Operation) -> bool:
    """Returns whether a layer has a method as an attribute: its object may be, or hold, anything."""
    return any(callable(value) and hasattr(value, "__self__") for value in vars(layer).values())


def holds_function_over_rows(layer: keras.Layer) -> bool:
    """Returns whether a layer has an attribute that is a function which may mix rows, as `keras.ops.flip` does: any
    function except Keras' activations and those of tfdist."""
    return any(
        callable(value)
        and not isinstance(value, (type, keras.Layer))
        and not name.endswith((*_OF_WEIGHTS, *_OF_EACH_LAYER))
        and (hasattr(value, "__self__") or not module_of(value).startswith((_ACTIVATIONS, "tfdist.")))
        for name, value in vars(layer).items()
    )


def _is_known(layer: keras.Layer) -> bool:
    """Returns whether a layer, with all layers inside it, is Keras' own and holds no function of the user's."""
    return all(is_of_keras(each) and not holds_own_function(each) for each in keras_layers.all_layers(layer))


def _calming(layer: keras.Layer) -> dict[str, Callable]:
    """Returns attributes with which a layer neither draws random numbers nor mixes rows: Keras' own layers work as in
    inference. In a user's class derived from BatchNormalization only the moments do, which come from all workers in
    training; the rest of its code is examined."""
    if _is_known(layer) and keras_layers.takes_training(layer) and "call" not in vars(layer):
        return {"call": _not_training(layer.call)}
    return _moments(layer)


def _moments(layer: keras.Layer) -> dict[str, Callable]:
    if keras_batch_norm.takes_keras_moments(layer):
        return {keras_batch_norm.MOMENTS: lambda inputs, mask: keras_batch_norm.moving_moments(layer, inputs.dtype)}
    return {}


@contextlib.contextmanager
def moving_moments_taken(layers: Iterable[keras.Layer]) -> Iterator[None]:
    """Context manager in which each BatchNormalization uses its moving moments in training, too: the moments of a
    batch come from all workers."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            for name, function in _moments(layer).items():
                stack.enter_context(attribute_replaced(layer, name, function))
        yield


def _not_training(call: Callable) -> Callable:
    return lambda *arguments, **options: call(*arguments, **{**options, "training": False})
