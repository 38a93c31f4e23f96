"""Keras' global random state: the generator for draws without one of their own, and the seeds of new generators."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator

from tfdist.compat.keras_variables import stored_value

# The module whose function `MAKE_DEFAULT_SEED` gives a SeedGenerator without a seed its first state; it is replaced
# temporarily. Without it workers start with different seeds, and draw differently where they must not.
SEEDS: ModuleType = seed_generator
MAKE_DEFAULT_SEED = "make_default_seed"


def make_default_seed() -> Callable[[], int]:
    """The function that is in place now."""
    return getattr(SEEDS, MAKE_DEFAULT_SEED)


def is_seed_state(variable: Any) -> bool:
    """Whether a variable is the state of a SeedGenerator. Relies on the name that a SeedGenerator gives it."""
    return getattr(variable, "path", "").endswith("seed_generator_state")


def made_global_seed_generator() -> keras.random.SeedGenerator | None:
    """The generator for draws without one of their own; makes it if needed, without drawing from Python's random
    numbers. Relies on the function with which Keras makes it; without it replicas would make variables in a step, and
    fail."""
    before = random.getstate()
    if make := getattr(seed_generator, "global_seed_generator", None):
        make()
    random.setstate(before)
    return global_seed_generator()


def use_generator(generator: keras.random.SeedGenerator | None) -> None:
    """Makes this thread use this generator for draws without one of their own: Keras keeps one for each thread. None:
    one that is made when it is needed. Relies on the global attribute of `global_seed_generator`."""
    global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, generator)


def has_state(generator: keras.random.SeedGenerator) -> bool:
    """Whether the generator's state has a value: not yet if it was made while a tf.function is traced."""
    stored = stored_value(generator.state)
    with tf.init_scope():
        return stored is None or not tf.executing_eagerly() or bool(stored.is_initialized())


def global_seed_generator() -> keras.random.SeedGenerator | None:
    """The generator for draws without one of their own, if it has been made. Relies on the global attribute
    GLOBAL_SEED_GENERATOR of keras.src.random.seed_generator."""
    return global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)


def states_beside() -> list[keras.Variable]:
    """Returns the states of generators that belong to no model: of Keras' global generator, if it has been made."""
    generator = global_seed_generator()
    return [] if generator is None else [generator.state]
