"""The context manager of a trial: a computation made once to see how a model behaves, without side effects."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.artifacts import state
from tfdist.artifacts.objects_inside import tensors_in
from tfdist.compat import keras_layers, keras_random, tensorflow_random
from tfdist.compat.tensorflow_functions import functions_inline
from tfdist.runtime import batch_norm
from tfdist.runtime.scopes import ThreadScope

_PLAIN = (tf.Tensor, bool, int, float, str, bytes, tuple, type(None))

in_trials = ThreadScope()  # other workers may not make the same trial: code inside must not wait for them


@contextlib.contextmanager
def generators_kept(traced: bool = False) -> Iterator[None]:
    """Context manager that restores Python's, NumPy's and TensorFlow's global generators, and in which tf.functions
    held by layers keep no traces. All workers must enter it, also those that try nothing: a layer may draw from the
    generators when the step is traced.

    traced: nothing runs inside, so that TensorFlow's kernels need not start over, and a worker may enter it alone."""
    before, of_keras = state.generator_states(), keras_random.global_seed_generator()
    try:
        if of_keras is not None and not keras_random.has_state(of_keras):
            keras_random.use_generator(None)
        with in_trials(), functions_inline(), contextlib.nullcontext() if traced else tensorflow_random.state_kept():
            yield
    finally:
        keras_random.use_generator(of_keras)  # a generator made by a trial would exist on this worker alone
        state.restore_generator_states(before)


@contextlib.contextmanager
def attributes_kept(layers: Sequence[keras.Layer], traced: bool = False) -> Iterator[None]:
    """Context manager after which layers forget the tensors that they have kept inside: those of a trial are made of
    rows that nobody knows, and those of a trace (such as a constant made once) are of no use in another graph; also
    those inside lists, dicts and objects. A layer forgets all of it or nothing, in its attributes and in dicts among
    them: by a number or a word it may know for what it has made a tensor.

    traced: forget tensors of a graph only; others come from outside of it.
    """
    before = [[(held, dict(held)) for held in _held_by(layer)] for layer in layers]

    def is_of_no_use(value: object, earlier: object) -> bool:
        made = tensors_in(value) if value is not earlier else []
        return any(not (traced and hasattr(tensor, "numpy")) for tensor in made)

    try:
        yield
    finally:
        for layer, kept in zip(layers, before, strict=True):
            earlier = {id(held): values for held, values in kept}
            was_built = layer.__dict__.get("built") and not earlier[id(layer.__dict__)].get("built")
            if not was_built and any(
                is_of_no_use(value, earlier.get(id(held), {}).get(name))
                for held in _held_by(layer)
                for name, value in held.items()
            ):
                for held, values in kept:
                    _forget(held, values)


def trace(model: keras.Model, function: Callable, *specs: Any) -> None:
    """Traces a function that calls the model, without running it, just for what happens in the trace."""
    layers = keras_layers.all_layers(model)
    with batch_norm.each_alone(), generators_kept(), attributes_kept(layers, traced=True):
        tf.function(function, autograph=False).get_concrete_function(*specs)


def _held_by(layer: keras.Layer) -> list[dict]:
    """Returns the attributes of a layer, and the dicts among them."""
    return [layer.__dict__, *(value for value in layer.__dict__.values() if isinstance(value, dict))]


def _forget(now: dict, values: dict) -> None:
    for name in [name for name, value in now.items() if _is_plain(value) or tensors_in(value)]:
        if name in values:
            now[name] = values[name]
        else:
            del now[name]


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, dict) and all(map(_is_plain, value.values())))
