"""Custom training loops, as a user writes them, inside tfdist.spread."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

CRITIC_UNITS = 5
CLASS_WEIGHT = {0: 0.5, 1: 2.0, 2: 1.0}


def run(
    case: Mapping[str, Any], model: keras.Model, functions: Any, batches: Sequence[tuple], eager: bool
) -> dict[str, np.ndarray]:
    """Returns the values shown in each step, and the weights of models other than `model`. functions: with `spread`, or
    without it, for a plain loop."""
    spread = getattr(functions, "spread", lambda *_: contextlib.nullcontext())
    with contextlib.ExitStack() as stack:
        make = functools.partial(on_batch, case) if case["loop"] == "on_batch" else LOOPS[case["loop"]]
        step, others = make(model, lambda *pair: stack.enter_context(spread(*pair)))
        if not eager and case["loop"] != "on_batch":  # Keras' functions trace steps themselves
            step = tf.function(step, reduce_retracing=True)
        shown = [step(*batch) for batch in batches]
    found = {f"loss/{number}": np.array(values, np.float64) for number, values in enumerate(shown)}
    return found | {
        f"model/critic-{index}": np.asarray(variable.value).astype(np.float64)
        for index, variable in enumerate(variable for other in others for variable in other.variables)
    }


def own(model: keras.Model, spread: Callable) -> tuple[Callable, list[keras.Model]]:
    """Keras' own training step, written out."""
    spread(model, model.optimizer)

    def step(x, y, w=None):
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True), w)
        _apply(model.optimizer, tape, loss, model)
        return (loss,)

    return step, []


def on_batch(case: Mapping[str, Any], model: keras.Model, spread: Callable) -> tuple[Callable, list[keras.Model]]:
    """Keras' train_on_batch and test_on_batch."""
    spread(model)
    class_weight = CLASS_WEIGHT if "class_weight" in case["fit"] else None

    def step(x, y, w=None):
        trained = model.train_on_batch(x, y, sample_weight=w, class_weight=class_weight, return_dict=True)
        tested = model.test_on_batch(x, y, sample_weight=w, return_dict=True)
        return [found[name] for found in (trained, tested) for name in sorted(found)]

    return step, []


def gan(model: keras.Model, spread: Callable, penalty: float = 0.0) -> tuple[Callable, list[keras.Model]]:
    """The model generates values like the targets; gradients pass through a critic into it. penalty: factor of a
    penalty on the norm of the critic's gradient with respect to its inputs."""
    critic = _critic(normalized=not penalty)
    optimizer = keras.optimizers.SGD(0.1, global_clipnorm=0.5)
    spread(model, model.optimizer)
    spread(critic, optimizer)

    def step(x, y, w=None):
        with tf.GradientTape(persistent=True) as tape:
            made = tf.cast(model(x, training=True), y.dtype)
            on_made, on_real = critic(made, training=True), critic(y, training=True)
            fools = tf.reduce_mean(tf.nn.softplus(-on_made)) + sum(tf.cast(loss, y.dtype) for loss in model.losses)
            tells = tf.reduce_mean(tf.nn.softplus(on_made)) + tf.reduce_mean(tf.nn.softplus(-on_real))
            if penalty:
                with tf.GradientTape() as inner:
                    inner.watch(y)
                    on_real = critic(y, training=True)
                slope = tf.reduce_sum(tf.square(inner.gradient(on_real, y)), -1)
                tells += penalty * tf.reduce_mean(tf.square(slope - 1.0))
        _apply(model.optimizer, tape, fools, model)
        _apply(optimizer, tape, tells, critic)
        return fools, tells

    return step, [critic]


def _critic(normalized: bool) -> keras.Model:
    critic = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(CRITIC_UNITS, activation="tanh"),
            *([keras.layers.BatchNormalization()] if normalized else []),
            keras.layers.Dense(1),
        ]
    )
    random = np.random.default_rng(1)
    for variable in critic.trainable_variables:
        variable.assign(random.normal(size=variable.shape).astype("float32"))
    return critic


def _apply(optimizer: keras.Optimizer, tape: tf.GradientTape, loss: tf.Tensor, model: keras.Model) -> None:
    variables = model.trainable_variables
    gradients = tape.gradient(
        loss, [variable.value for variable in variables], unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    optimizer.apply(gradients, variables)


LOOPS: dict[str, Callable] = {
    "own": own,
    "gan": gan,
    "gan_penalty": lambda model, spread: gan(model, spread, penalty=0.3),
}
