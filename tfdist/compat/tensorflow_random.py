"""TensorFlow's global random state, which can be set publicly (tf.random.set_seed), but not read (TensorFlow 2.21)."""

from __future__ import annotations

import contextlib
import random
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import random_seed

from tfdist.compat.temporary_attributes import attribute_replaced
from tfdist.compat.tensorflow_functions import functions_inline
from tfdist.compat.tensorflow_variables import values_kept

_BETWEEN_KEYS = 0x9E3779B97F4A7C1  # distance between the keys of two replicas
_BETWEEN_SEEDS = 0x9E3779B1  # the same of their seeds; odd, so that no two of them are the same
_lent: tuple[int, int | None] | None = None  # inside `seed_lent`: the seed, and the user's own
_thread = threading.local()  # by: how far this thread has moved the seeds


def moved_seed(seed: Any, by: int) -> Any:
    """Returns a seed, a number or a tensor, moved away from the same seed of other workers or replicas."""
    return (seed + by * _BETWEEN_SEEDS) % 2**31


def _context() -> Any:
    return context.context()


def global_seed() -> int | None:
    """The seed that tf.random.set_seed was given; None if it was not called.

    Relies on tensorflow.python's `global_seed`; without it data that is shuffled without a seed is not recognized.
    """
    return context.global_seed()


def users_seed() -> int | None:
    """`global_seed`, or the user's own while another is there from `seed_lent`."""
    seed = context.global_seed()
    return _lent[1] if _lent is not None and seed == _lent[0] else seed


def state_digest() -> int:
    """A checksum of the seed and of the number of operations that have drawn their own seed from it; 0 without a seed.
    Relies on `Context._rng`; without it workers do not notice that they would draw different numbers.
    """
    seed = context.global_seed()
    return 0 if seed is None else zlib.crc32(repr((seed, _context()._rng.getstate())).encode())


def users_state_digest() -> int:
    """`state_digest`, or 0 while the seed is from `seed_lent`: the user has set none, or not the same everywhere."""
    return 0 if _lent is not None and context.global_seed() == _lent[0] else state_digest()


@contextlib.contextmanager
def seed_lent(seed: int, anew: bool) -> Iterator[None]:
    """Context manager that sets this seed, as tf.random.set_seed would, and restores the user's own state at exit.

    anew: whether operations may have drawn with this seed before; then each worker's kernels start over. Relies on
    `Context._seed`, `Context._rng` and `Context.clear_kernel_cache`; without them a seed that workers agree on would
    stay, and the arrays of later calls would come in the same order in all epochs."""
    global _lent
    this, before = _context(), _lent
    own = this._seed, getattr(this, "_rng", None)  # there is no `_rng` before the first seed
    this._seed, this._rng, _lent = seed, random.Random(seed), (seed, users_seed())
    try:
        if anew:
            this.clear_kernel_cache()
        yield
    finally:
        _lent = before
        if this._seed == seed:  # else the user has set another seed inside
            this._seed, this._rng = own
            if anew:
                this.clear_kernel_cache()


@contextlib.contextmanager
def state_kept() -> Iterator[None]:
    """Context manager that restores the global state at exit, whatever was drawn. If there is a seed, every kernel that
    draws starts over. Relies on `Context._rng` and `Context.clear_kernel_cache`; without them workers that try a model,
    and workers that do not, would draw different numbers later.
    """
    if context.global_seed() is None:
        yield
        return
    before = _context()._rng.getstate()
    try:
        yield
    finally:
        _context()._rng.setstate(before)
        _context().clear_kernel_cache()  # each kernel has its own generator, which would continue where it stopped


@contextlib.contextmanager
def seeds_moved(by: int) -> Iterator[None]:
    """Context manager in which operations of tf.random that this thread makes, also in graphs inside the current one,
    draw other numbers for another `by`, and their usual numbers for 0. Inside another such context both add up.

    In each graph TensorFlow counts operations from 0, and makes their seeds of this count and the global seed. So it
    gives the same seeds to all workers, and to what is traced twice. Relies on `random_seed.get_seed`, which gives all
    seeds, and which reads `Context._seed`, in a graph `Graph.seed`; without them workers draw the same dropout masks.
    So they would with a trace that a tf.function has from elsewhere: it is computed in place.
    """
    if not hasattr(random_seed.get_seed, "is_movable"):  # permanently: other threads may be inside, too
        random_seed.get_seed = _movable(random_seed.get_seed)
    before = getattr(_thread, "by", 0)
    _thread.by = before + by
    try:
        with functions_inline(drawing=True):
            yield
    finally:
        _thread.by = before


def _movable(get_seed: Callable[[int | None], tuple]) -> Callable[[int | None], tuple]:
    def movable(op_seed: int | None) -> tuple:
        owner, name = (_context(), "_seed") if tf.executing_eagerly() else (tf.compat.v1.get_default_graph(), "seed")
        seed, by = getattr(owner, name), getattr(_thread, "by", 0)
        if seed is None or not by:
            return get_seed(op_seed)
        setattr(owner, name, moved_seed(int(seed), by))
        try:
            return get_seed(op_seed)
        finally:
            setattr(owner, name, seed)

    movable.is_movable = True  # pyright: ignore[reportFunctionMemberAccess] - a mark for `seeds_moved`
    return movable


@contextlib.contextmanager
def seeded_graphs(seed: int) -> Iterator[None]:
    """Context manager in which functions that are traced draw the numbers of this seed, each from the first number on.
    Relies on `Context._seed`; without it a layer whose draws mix rows is not found.
    """
    with attribute_replaced(_context(), "_seed", seed):
        yield


@contextlib.contextmanager
def redrawn(by: int) -> Iterator[None]:
    """Context manager in which functions that are traced outside of a graph draw other numbers, if tf.random.set_seed
    was called; otherwise they do so in any case. Relies on `Context._seed`."""
    seed = context.global_seed()
    with attribute_replaced(_context(), "_seed", seed + by) if by and seed is not None else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def repeated(seed: int) -> Iterator[None]:
    """Context manager in which draws outside of graphs, and in graphs that are traced inside it, give the numbers of
    this seed, from the first on. Relies on `Context._seed`, `Context._rng` and `Context.clear_kernel_cache`; without
    them a layer that mixes rows is not found if something is drawn in loops."""
    this = _context()
    with contextlib.ExitStack() as stack:
        stack.callback(this.clear_kernel_cache)
        stack.enter_context(attribute_replaced(this, "_seed", seed))
        stack.enter_context(attribute_replaced(this, "_rng", random.Random(seed)))
        this.clear_kernel_cache()  # each kernel has its own generator, which would continue where it stopped
        yield


@contextlib.contextmanager
def draws_undone(by: int = 0) -> Iterator[list[tf.Variable]]:
    """Context manager that yields the states of the tf.random.Generators that draw inside, wherever they are kept, and
    restores these states at exit. by: they draw other numbers, the same for the same `by`. Relies on `Generator.skip`,
    with which each draw begins.
    """
    states: list[tf.Variable] = []
    before: list[tf.Tensor] = []
    skip = tf.random.Generator.skip

    def kept_first(generator: tf.random.Generator, delta: Any) -> tf.Tensor:
        state = generator.state
        if not any(state is each for each in states):
            with tf.init_scope():
                before.append(tf.identity(state))
                states.append(state)
                state.assign(state + by)
        return skip(generator, delta)

    try:
        with attribute_replaced(tf.random.Generator, "skip", kept_first):
            yield states
    finally:
        for state, value in zip(states, before, strict=True):
            state.assign(value)


@contextlib.contextmanager
def keys_moved(by: int | tf.Tensor) -> Iterator[None]:
    """Context manager in which each tf.random.Generator draws other numbers for another `by`, and its usual numbers for
    0; its state advances alike. Generators with a state for each replica are left out. Relies on `Generator.skip`, with
    which each draw begins and whose last number is the key."""
    skip = tf.random.Generator.skip

    @tf.autograph.experimental.do_not_convert
    def with_another_key(generator: tf.random.Generator, delta: Any) -> tf.Tensor:
        found = skip(generator, delta)
        return found if hasattr(generator.state, "values") else tf.concat([found[:-1], found[-1:] + step], 0)

    step = tf.cast(by, tf.int64) * _BETWEEN_KEYS
    with attribute_replaced(tf.random.Generator, "skip", with_another_key):
        yield


@contextlib.contextmanager
def moved(states: Sequence[tf.Variable], by: int) -> Iterator[None]:
    """Context manager in which generators with these states draw other numbers, the same for the same `by`; restores
    the states at exit."""
    with values_kept(states) as before:
        for state, value in before:
            state.assign(value + by)
        yield
