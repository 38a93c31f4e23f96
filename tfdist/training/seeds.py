"""The states of a model's seed generators (dropout, random preprocessing), as pure functions of the position in
training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfdist.compat import tensorflow_random
from tfdist.compat.keras_draws import asked_before_draws
from tfdist.compat.keras_layers import keep_message
from tfdist.compat.keras_random import (
    is_seed_state,
    made_global_seed_generator,
    states_beside,
    use_generator,
)
from tfdist.control.exit_codes import ConfigError
from tfdist.runtime.base import Runtime
from tfdist.training.row_checks.calm_layers import has_own_code
from tfdist.training.unsaved_state_checks import check_compiled

# TensorFlow's type stubs declare it for plain integers.
_fold_in: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] = tf.random.fold_in  # type: ignore[assignment]


def seed_states(model: keras.Model) -> list[tf.Variable]:
    """Returns the states of all seed generators (dropout, random preprocessing), int64 [2] each, in a fixed order. The
    last is the state of Keras' global generator, from which user code may draw, if `with_generator` has made it.
    """
    return [state.value for state in _states(model)]


def _states(model: keras.Model) -> list[keras.Variable]:
    return [*(variable for variable in model.variables if is_seed_state(variable)), *states_beside()]


def with_generator(model: keras.Model, own_objective: bool) -> keras.Model:
    """Returns the model. Makes Keras' global generator, from which a user's layers or objective draw if they have no
    generator. To be called where the model's variables are made.
    """
    if own_objective or has_own_code(model):
        made_global_seed_generator()
    return model


def draw_from(generator: keras.random.SeedGenerator | None) -> None:
    """Makes draws without a generator, in this thread (maybe a replica's), use this generator, if not None."""
    if generator is not None:
        use_generator(generator)


@contextlib.contextmanager
def only_known_draws(model: keras.Model) -> Iterator[None]:
    """Context manager in which a step is traced. Raises ConfigError on a draw from a SeedGenerator that is neither the
    model's nor Keras' global one: the step does not set it, and no snapshot holds it.
    """

    def ask(generator: keras.random.SeedGenerator) -> None:
        if not any(generator.state is state for state in _states(model)):
            raise keep_message(
                ConfigError(
                    "Something is drawn from a keras.random.SeedGenerator that no layer tracks (of a module, a"
                    " function, or an object inside a layer), so no snapshot would contain it: make it an attribute of"
                    " the layer (self.seed = keras.random.SeedGenerator(...)), or draw without one"
                    " (keras.random.normal(shape))."
                )
            )

    with asked_before_draws(ask):
        yield


@contextlib.contextmanager
def drawing(model: keras.Model, runtime: Runtime) -> Iterator[None]:
    """Context manager in which a replica's step is traced: tf.random and a tf.random.Generator draw different numbers
    on different replicas. Raises ConfigError if XLA prevents that, and as `only_known_draws`.
    """
    replica = runtime.replica_id()
    # If this process has several replicas, which are traced in turns, TensorFlow's strategies give them different keys.
    alone = runtime.local_replicas == 1 and runtime.replicas > 1
    keys = tensorflow_random.keys_moved(replica) if alone else contextlib.nullcontext()
    number = tf.get_static_value(replica)  # None: not known while the step is traced, as of a runtime of one's own
    seeds = tensorflow_random.seeds_moved(runtime.first_replica if number is None else int(number))
    with only_known_draws(model), keys, seeds:
        yield
    if runtime.replicas > 1:
        check_compiled("add --nojit_compile, and drop --jit_tune")


@contextlib.contextmanager
def updating() -> Iterator[None]:
    """Context manager in which weights are updated, on each replica. Raises ConfigError if a constraint draws random
    numbers: replicas would draw different numbers, and get different weights.
    """

    def refuse(_: keras.random.SeedGenerator) -> None:
        raise ConfigError(
            "A constraint of weights draws with keras.random, where all replicas must do the same: let a layer draw, or"
            " give the constraint numbers of its own (keras.random.normal(shape, seed=3))."
        )

    with asked_before_draws(refuse):
        yield


def seed_values(count: int, seed: int, step: tf.Tensor, micro: tf.Tensor, replica: tf.Tensor) -> list[tf.Tensor]:
    """Returns the states of `count` seed generators, int64 [2] each, as a pure function of (seed, index, step,
    micro-batch, replica).
    """
    base = tf.constant([seed, 0x7F4A7C15], tf.int64)
    for number in (step, micro, replica) if count else ():
        base = _fold_in(base, tf.cast(number, tf.int64))
    return [_fold_in(base, tf.constant(index, tf.int64)) for index in range(count)]


def reseed(states: list[tf.Variable], seed: int, step: tf.Tensor, micro: tf.Tensor, replica: tf.Tensor) -> None:
    """Sets every seed generator to its `seed_values`.

    Otherwise Keras would draw the same masks on all workers, and a snapshot would have to hold each worker's
    generators.
    """
    for state, value in zip(states, seed_values(len(states), seed, step, micro, replica), strict=True):
        state.assign(value)


def reseed_for_part(generator: keras.random.SeedGenerator | None, part: int) -> None:
    """Sets Keras' global generator, after `reseed`, to other numbers for each part of a pipeline: one device would
    draw for all parts in turn. A layer's own generator is in one part only (shared_state.py)."""
    if generator is not None:
        generator.state.assign(_fold_in(generator.state.value, tf.constant(part, tf.int64)))
