"""The states of a model's seed generators (dropout, random preprocessing), as pure functions of where training is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfdist.compat import tensorflow_random
from tfdist.compat.keras_draws import asked_before_draws
from tfdist.compat.keras_layers import keep_message
from tfdist.compat.keras_random import (
    global_seed_generator,
    is_seed_state,
    made_global_seed_generator,
    use_generator,
)
from tfdist.control.exit_codes import ConfigError
from tfdist.runtime.base import Runtime
from tfdist.training.row_checks.calm_layers import has_own_code

# TensorFlow's stubs know it as one of whole numbers.
_fold_in: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] = tf.random.fold_in  # type: ignore[assignment]


def seed_states(model: keras.Model) -> list[tf.Variable]:
    """The states of all seed generators (dropout, random preprocessing), int64 [2] each, in a fixed order. The last is
    the state of Keras' global generator, from which code of the user's may draw, if `with_generator` has made it.
    """
    return [state.value for state in _states(model)]


def _states(model: keras.Model) -> list[keras.Variable]:
    return [*(variable for variable in model.variables if is_seed_state(variable)), *states_beside()]


def with_generator(model: keras.Model, own_objective: bool) -> keras.Model:
    """The model. Makes Keras' global generator, from which layers or an objective of the user's own draw if they have
    no generator. To be called where the model's variables are made.
    """
    if own_objective or has_own_code(model):
        made_global_seed_generator()
    return model


def draw_from(generator: keras.random.SeedGenerator | None) -> None:
    """Makes this thread, maybe a replica's, draw from this generator (if any) what is drawn without one."""
    if generator is not None:
        use_generator(generator)


@contextlib.contextmanager
def drawing(model: keras.Model, runtime: Runtime) -> Iterator[None]:
    """The step of a replica is traced inside: a tf.random.Generator draws other numbers than on other replicas.

    Raises ConfigError where something is drawn from a SeedGenerator that is not the model's, nor Keras': the step does
    not set it, and no snapshot holds it.
    """

    def ask(generator: keras.random.SeedGenerator) -> None:
        if not any(generator.state is state for state in _states(model)):
            raise keep_message(
                ConfigError(
                    "Something is drawn from a keras.random.SeedGenerator that no layer holds (of a module, a function,"
                    " or an object inside a layer), so that no snapshot would: make it an attribute of the layer"
                    " (self.seed = keras.random.SeedGenerator(...)), or draw without one (keras.random.normal(shape))."
                )
            )

    # TensorFlow's strategies give each of several replicas here, which are traced in turns, other keys.
    alone = runtime.local_replicas == 1 and runtime.replicas > 1
    keys = tensorflow_random.keys_moved(runtime.replica_id()) if alone else contextlib.nullcontext()
    with asked_before_draws(ask), keys:
        yield


@contextlib.contextmanager
def updating() -> Iterator[None]:
    """Weights are updated inside, on each replica. Raises ConfigError where a constraint draws: replicas would draw
    different numbers, and have different weights.
    """

    def refuse(_: keras.random.SeedGenerator) -> None:
        raise ConfigError(
            "A constraint of weights draws by keras.random, where all replicas must do the same: let a layer draw, or"
            " give the constraint numbers of its own (keras.random.normal(shape, seed=3))."
        )

    with asked_before_draws(refuse):
        yield


def states_beside() -> list[keras.Variable]:
    """The states of generators that belong to no model: of Keras' global generator, if it has been made."""
    generator = global_seed_generator()
    return [] if generator is None else [generator.state]


def seed_values(count: int, seed: int, step: tf.Tensor, micro: tf.Tensor, replica: tf.Tensor) -> list[tf.Tensor]:
    """The states of `count` seed generators, int64 [2] each, as a pure function of (seed, index, step, micro-batch,
    replica).
    """
    base = tf.constant([seed, 0x7F4A7C15], tf.int64)
    for number in (step, micro, replica) if count else ():
        base = _fold_in(base, tf.cast(number, tf.int64))
    return [_fold_in(base, tf.constant(index, tf.int64)) for index in range(count)]


def reseed(states: list[tf.Variable], seed: int, step: tf.Tensor, micro: tf.Tensor, replica: tf.Tensor) -> None:
    """Sets every seed generator to its `seed_values`.

    Keras would draw the same masks on all workers, and a restored run would have to save each worker's generators.
    """
    for state, value in zip(states, seed_values(len(states), seed, step, micro, replica), strict=True):
        state.assign(value)
