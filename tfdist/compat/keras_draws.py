"""What is drawn by keras.random: asked about before, with other seeds for a time, or constants in its place.

Relies on `SeedGenerator.next`, which gives all seeds but those that are whole numbers, and on the module of the backend
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

_CONSTANT = 0.37  # of the range: no threshold that layers compare with
# Of each thread. dims: of what is being drawn.
_thread = threading.local()


@contextlib.contextmanager
def asked_before_draws(ask: Callable[[keras.random.SeedGenerator], None]) -> Iterator[None]:
    """A context in which, in this thread, `ask` is called with each generator before something is drawn from it."""
    with _set("ask", ask):
        yield


@contextlib.contextmanager
def seeds_changed(
    change: Change, owner: object, fixed: Callable[[Dims | None], object] | None = None
) -> Iterator[None]:
    """A context in which, in this thread, `change(seed, dims)` takes the place of each seed that a generator gives; in
    the place of what contexts around it do, or on top of it if they have the same owner. dims: of what is drawn with
    the seed; None: not known, as nothing of keras.random draws it. fixed: is called with the dims of what is drawn with
    a whole number, always the same.
    """
    outer, around = getattr(_thread, "change", None), getattr(_thread, "owner", None)
    chained = (lambda seed, dims: change(outer(seed, dims), dims)) if outer and around is owner else change
    with _set("change", chained), _set("owner", owner), _set("fixed", fixed):
        yield


@contextlib.contextmanager
def constant_draws(moved: int = 0) -> Iterator[None]:
    """A context in which keras.random gives this thread constants, whatever the shape; what would be dropped or
    shuffled stays as it is. Not where the seed is a whole number, which draws the same always. moved: what is added to
    seeds with which something else draws.
    """
    with _set("constant", True), _set("moved", moved):
        yield


@contextlib.contextmanager
def _set(name: str, value: Any) -> Iterator[None]:
    if not hasattr(keras.random.SeedGenerator.next, "is_changeable"):  # for good: other threads may be inside, too
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
    """constant: takes the arguments of `draw`, the backend's function of this name."""
    shaped = _SHAPED.get(name, constant)

    @tf.autograph.experimental.do_not_convert
    def replaceable(*args: Any, **options: Any) -> Any:
        is_fixed = isinstance(options.get("seed"), int)
        if getattr(_thread, "constant", None) and not is_fixed:
            return constant(*args, **options)
        if getattr(_thread, "change", None) is None:
            return draw(*args, **options)
        dims = None
        with contextlib.suppress(Exception):  # of arguments that it does not take
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
    # Whose shapes must suit each other.
    return (
        inputs if noise_shape is None else inputs + tf.zeros(tf.shape(_noise(inputs, rate, noise_shape)), inputs.dtype)
    )


def _unshuffled(x: tf.Tensor, axis: int = 0, seed: Any = None) -> tf.Tensor:
    return x


def _noise(inputs: tf.Tensor, rate: float, noise_shape: Sequence | None = None, seed: Any = None) -> tf.Tensor:
    """Of the shape of what dropout draws."""
    if noise_shape is None:
        return inputs
    return tf.zeros([tf.shape(inputs)[axis] if dim is None else dim for axis, dim in enumerate(noise_shape)])


def _order(x: tf.Tensor, axis: int = 0, seed: Any = None) -> tf.Tensor:
    """Of the shape of what shuffling draws."""
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
