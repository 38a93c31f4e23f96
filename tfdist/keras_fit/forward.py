"""The forward pass of a model over the workers: what stands in for `model.call` while the model is spread."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_fit.gradients import Gradients
from tfdist.keras_fit.lookups import shared_in
from tfdist.keras_fit.random_numbers import RandomNumbers
from tfdist.keras_fit.rows import Part, together
from tfdist.runtime.sockets import Sockets


class SpreadCall:
    """Takes the global batch, computes this worker's rows, returns all rows.

    Attributes: calls, how often it was called over the workers.
    """

    def __init__(self, model: keras.Model, runtime: Sockets, gradients: Gradients, random_numbers: RandomNumbers):
        self._model, self._runtime, self._gradients, self._random_numbers = model, runtime, gradients, random_numbers
        self._call: Callable = model.call
        self._alone = False
        self._finders: dict[str, Callable[[], dict]] = {}  # by the inputs of a forward pass
        self.calls = 0
        gradients.calls.add(self)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, each worker computes all rows itself."""
        before, self._alone = self._alone, True
        try:
            yield
        finally:
            self._alone = before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._alone or self._gradients.are_of_own_rows:  # the latter: inside another model that is spread
            return self._call(*args, **kwargs)
        self.calls += 1
        if self._gradients.share is not None:  # these are our own rows
            outputs, losses = self._forward(args, kwargs)
        else:
            part = Part(self._runtime, args or kwargs)
            args, kwargs = part.take(args), part.take(kwargs)
            outputs, losses = together(self._runtime, part, lambda: self._forward(args, kwargs))
        for layer in self._model._flatten_layers():
            layer._losses.clear()
        self._model._losses.extend(losses)
        return outputs

    def _forward(self, args: tuple, kwargs: dict) -> tuple[Any, list]:
        """(outputs, recorded losses) of this worker's rows."""
        tensors, rebuild = _tensors_of((args, kwargs))

        def forward(tensors: list[tf.Tensor]) -> tuple[Any, list, list]:
            args, kwargs = rebuild(tensors)
            with self._gradients.of_own_rows(), self._random_numbers.of_own_rows():
                outputs = self._call(*args, **kwargs)
            losses = [loss for layer in self._model._flatten_layers() for loss in layer._losses]
            return outputs, losses, [getattr(output, "_keras_mask", None) for output in keras.tree.flatten(outputs)]

        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
        find_shared = self._finders.setdefault(str(rebuild(specs)), self._finder(forward, specs))
        if not self._compiles(kwargs) or find_shared():
            outputs, losses, _ = forward(tensors)
            return outputs, losses
        outputs, losses, masks = tf.function(forward, jit_compile=True, autograph=False)(tensors)
        for output, mask in zip(keras.tree.flatten(outputs), masks, strict=True):
            if mask is not None:
                output._keras_mask = mask
        return outputs, losses

    def shared_lookups(self) -> dict[int, str]:
        """See lookups.py: those of all forward passes so far."""
        return {table: name for find in self._finders.values() for table, name in find().items()}

    def _finder(self, forward: Callable, specs: list[tf.TensorSpec]) -> Callable[[], dict]:
        """What finds the shared lookups of a forward pass when it is asked, as that takes another trace."""
        @functools.cache
        def find() -> dict[int, str]:
            layers = self._model._flatten_layers()
            losses = [list(layer._losses) for layer in layers]
            try:
                return shared_in(forward, specs)
            finally:
                for layer, before in zip(layers, losses, strict=True):
                    layer._losses[:] = before

        return find

    def _compiles(self, kwargs: dict) -> bool:
        """XLA compiles the pass over the own rows; but not collectives inside it. (And not lookups that do not depend on the batch,
        which cannot be told from others any more when their gradients come out of it.)"""
        model = self._model
        inside = kwargs.get("training") and any(isinstance(layer, keras.layers.BatchNormalization) for layer in model._flatten_layers())
        return bool(model.jit_compile) and not inside and not tf.executing_eagerly()


def _tensors_of(structure: Any) -> tuple[list[tf.Tensor], Callable[[list], Any]]:
    """(the tensors in a structure, a function that builds the same structure around others)"""
    flat = keras.tree.flatten(structure)
    shape = keras.tree.map_structure(lambda leaf: None, structure)
    places = [index for index, leaf in enumerate(flat) if isinstance(leaf, tf.Tensor)]

    def rebuild(tensors: list) -> Any:
        among = dict(zip(places, tensors, strict=True))
        return keras.tree.pack_sequence_as(shape, [among.get(index, leaf) for index, leaf in enumerate(flat)])

    tensors = [flat[index] for index in places]
    for index in places:
        flat[index] = None  # `rebuild` may live long
    return tensors, rebuild
