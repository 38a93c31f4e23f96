"""What drifts apart between workers is noticed: floats, whole numbers, truths. Seeds may differ."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.artifacts import state
from tfdist.control.exit_codes import DivergedError
from tfdist.runtime.weight_check import check_weights

KINDS = ("float32", "bfloat16", "int32", "int64", "uint8", "bool")


class Keeps(keras.layers.Layer):
    """Has a state of each kind, and a generator."""

    def build(self, shape):
        for kind in KINDS:
            self.add_weight(shape=(2,), dtype=kind, initializer="zeros", trainable=False, name=f"of_{kind}")
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x):
        return x


def held():
    """A worker's model, and what of it is compared."""
    model = keras.Sequential([keras.Input((2,)), Keeps(name="keeps")])
    optimizer = keras.optimizers.SGD()
    return model, state.WholeState(state.collect(model, optimizer, {})).held()


def compare(one, other):
    seen = []

    def gather(own):
        seen.append(own)
        return np.stack(seen)

    runtime = SimpleNamespace(local_replicas=1, local=lambda value: [value], all_gather=gather)
    check_weights(runtime, one, "at step 3")
    check_weights(runtime, other, "at step 3")


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_drifts_is_noticed(kind):
    (_, one), (model, other) = held(), held()
    compare(one, other)
    state_of = next(variable for variable in model.variables if variable.name == f"of_{kind}")
    state_of.assign(tf.cast([0, 1], kind))
    with pytest.raises(DivergedError, match=rf"rank 1 differ from the chief's at step 3 .* is \S+/of_{kind}\)"):
        compare(one, other)


def test_generators_may_differ():
    (_, one), (model, other) = held(), held()
    (seed,) = [variable for variable in model.variables if "seed" in variable.name]
    seed.assign(seed + 1)
    compare(one, other)
