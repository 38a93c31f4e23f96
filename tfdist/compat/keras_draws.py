"""Controls the random draws of keras.random: reports a draw before it happens, changes its seed, or makes it a
constant.

Relies on `SeedGenerator.next`, which gives all seeds except those that are plain integers, and on the backend's module
whose functions draw.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend

Dims = tuple[int | None, ...]
Change = Callable[[tf.Tensor, Dims | None], tf.Tensor]

_CONSTANT = 0.37  # fraction of the range: not a threshold that layers compare with
# State of each thread. dims: of the tensor being drawn.
_thread = threading.local()


@contextlib.contextmanager
def asked_before_draws(ask: Callable[[keras.random.SeedGenerator], None]) -> Iterator[None]:
    """Context manager: in this thread, calls `ask` with the generator before each draw from a generator."""
    with _set("ask", ask):
        yield


@contextlib.contextmanager
def seeds_changed(
    change: Change, owner: object, fixed: Callable[[Dims | None], object] | None = None
) -> Iterator[None]:
    """Context manager: in this thread, `change(seed, dims)` replaces each seed that a generator gives. It takes the
    place of the change of a surrounding context, or is applied on top of it if both have the same owner. dims: of the
    tensor that is drawn with the seed; None: unknown, as when the draw is not made by keras.random. fixed: called with
    the dims of each draw whose seed is a plain integer, and which therefore always gives the same numbers.
    """
    outer, around = getattr(_thread, "change", None), getattr(_thread, "owner", None)
    chained = (lambda seed, dims: change(outer(seed, dims), dims)) if outer and around is owner else change
    with _set("change", chained), _set("owner", owner), _set("fixed", fixed):
        yield


@contextlib.contextmanager
def constant_draws(moved: int = 0) -> Iterator[None]:
    """Context manager: keras.random gives this thread constants, whatever the shape; dropout and shuffling leave their
    inputs as they are. Draws whose seed is a plain integer are not changed: they always give the same numbers. moved:
    is added to seeds with which anything else draws.
    """
    with _set("constant", True), _set("moved", moved):
        yield


@contextlib.contextmanager
def _set(name: str, value: Any) -> Iterator[None]:
    if not hasattr(keras.random.SeedGenerator.next, "is_changeable"):  # permanently: other threads may be inside, too
        keras.random.SeedGenerator.next = _changeable(keras.random.SeedGenerator.next)
        for function, constant in _CONSTANTS.items():
            setattr(backend.random, function, _replaceable(function, getattr(backend.random, function), constant))
    before = getattr(_thread, name, None)
    setattr(_thread, name, value)
    try:
        yield
    finally:
        setattr(_thread, name, before)


def _changeable(draw_seed: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    @tf.autograph.experimental.do_not_convert
    def changeable(generator: keras.random.SeedGenerator, *args: Any, **options: Any) -> tf.Tensor:
        if ask := getattr(_thread, "ask", None):
            ask(generator)
        seed, change = draw_seed(generator, *args, **options), getattr(_thread, "change", None)
        seed = change(seed, getattr(_thread, "dims", None)) if change else seed
        return seed + tf.cast(_thread.moved, seed.dtype) if getattr(_thread, "moved", 0) else seed

    changeable.is_changeable = True
    return changeable


def _replaceable(name: str, draw: Callable[..., Any], constant: Callable[..., tf.Tensor]) -> Callable[..., Any]:
    """Wraps `draw`, the backend's function of this name. constant: takes the same arguments."""
    shaped = _SHAPED.get(name, constant)

    @tf.autograph.experimental.do_not_convert
    def replaceable(*args: Any, **options: Any) -> Any:
        is_fixed = isinstance(options.get("seed"), int)
        if getattr(_thread, "constant", None) and not is_fixed:
            return constant(*args, **options)
        if getattr(_thread, "change", None) is None:
            return draw(*args, **options)
        dims = None
        with contextlib.suppress(Exception):  # for arguments that it does not take
            shape = tf.TensorShape(shaped(*args, **options).shape)
            dims = None if shape.rank is None else tuple(shape)
        if is_fixed and (fixed := getattr(_thread, "fixed", None)):
            fixed(dims)
        with _set("dims", dims):
            return draw(*args, **options)

    return replaceable


def _filled(shape: Any, value: Any, dtype: Any) -> tf.Tensor:
    dtype = backend.standardize_dtype(dtype or backend.floatx())
    return tf.zeros(shape, dtype) + tf.cast(value, dtype)


def _normal(shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, seed: Any = None) -> tf.Tensor:
    return _filled(shape, mean + _CONSTANT * stddev, dtype)


def _uniform(shape: Any, minval: Any = 0.0, maxval: Any = 1.0, dtype: Any = None, seed: Any = None) -> tf.Tensor:
    return _filled(shape, minval + _CONSTANT * (maxval - minval), dtype)


def _integers(shape: Any, minval: Any, maxval: Any, dtype: Any = "int32", seed: Any = None) -> tf.Tensor:
    return _filled(shape, minval, dtype)


def _classes(logits: tf.Tensor, num_samples: int, dtype: Any = "int64", seed: Any = None) -> tf.Tensor:
    return tf.zeros([tf.shape(logits)[0], num_samples], dtype)


def _gamma(shape: Any, alpha: Any, dtype: Any = None, seed: Any = None) -> tf.Tensor:
    return _filled(shape, alpha, dtype)


def _binomial(shape: Any, counts: Any, probabilities: Any, dtype: Any = None, seed: Any = None) -> tf.Tensor:
    return _filled(shape, tf.floor(tf.cast(counts, tf.float32) * probabilities), dtype)


def _beta(shape: Any, alpha: Any, beta: Any, dtype: Any = None, seed: Any = None) -> tf.Tensor:
    return _filled(shape, _CONSTANT, dtype)


def _undropped(inputs: tf.Tensor, rate: float, noise_shape: Any = None, seed: Any = None) -> tf.Tensor:
    # The two shapes must be compatible, as in real dropout.
    return (
        inputs if noise_shape is None else inputs + tf.zeros(tf.shape(_noise(inputs, rate, noise_shape)), inputs.dtype)
    )


def _unshuffled(x: tf.Tensor, axis: int = 0, seed: Any = None) -> tf.Tensor:
    return x


def _noise(inputs: tf.Tensor, rate: float, noise_shape: Sequence | None = None, seed: Any = None) -> tf.Tensor:
    """Returns a tensor of the shape that dropout draws."""
    if noise_shape is None:
        return inputs
    return tf.zeros([tf.shape(inputs)[axis] if dim is None else dim for axis, dim in enumerate(noise_shape)])


def _order(x: tf.Tensor, axis: int = 0, seed: Any = None) -> tf.Tensor:
    """Returns a tensor of the shape that shuffling draws."""
    return tf.zeros([tf.shape(x)[axis]])


_CONSTANTS: dict[str, Callable[..., tf.Tensor]] = {
    "normal": _normal,
    "truncated_normal": _normal,
    "uniform": _uniform,
    "randint": _integers,
    "categorical": _classes,
    "gamma": _gamma,
    "binomial": _binomial,
    "beta": _beta,
    "dropout": _undropped,
    "shuffle": _unshuffled,
}
_SHAPED: dict[str, Callable[..., tf.Tensor]] = {"dropout": _noise, "shuffle": _order}
