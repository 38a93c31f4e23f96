"""What layers remember of a trial: nothing that was made of its rows, and nothing that says that it is still there."""

import types

import keras
import numpy as np
import pytest
from keras import ops

from tfdist.training.row_checks.trial_scope import attributes_kept


class Keeps(keras.layers.Layer):
    """Makes a tensor once for each width, and knows for which width it is."""

    def __init__(self, keep):
        super().__init__()
        self.keep, self.width, self.tables = keep, 0, {}
        self.build(None)

    def call(self, x):
        if self.width != x.shape[-1]:
            self.width = x.shape[-1]
            self.keep(self, ops.ones(self.width))
        return x * self.tables["scale"]


def inside(layer, tensor):
    layer.tables["scale"] = tensor


def anew(layer, tensor):
    layer.tables = {"scale": tensor}


@pytest.mark.parametrize("keep", [inside, anew])
@pytest.mark.parametrize("before", [0, 2])
def test_a_number_and_the_dict_that_it_speaks_of_are_forgotten_together(keep, before):
    layer = Keeps(keep)
    if before:
        layer(np.ones((1, before), "float32"))
    kept = dict(layer.tables)
    with attributes_kept([layer]):
        layer(np.ones((4, 5), "float32"))
    assert layer.width == before and layer.tables.keys() == kept.keys()
    assert all(layer.tables[name] is value for name, value in kept.items())
    assert layer(np.ones((4, 5), "float32")).shape == (4, 5)


@pytest.mark.parametrize(
    "inside_of", [lambda tensor: [tensor], lambda tensor: (tensor, 1), lambda tensor: types.SimpleNamespace(of=tensor)]
)
def test_a_tensor_inside_of_something_else_is_forgotten_too(inside_of):
    layer = keras.layers.Layer()
    layer.width, layer.kept = 2, inside_of(ops.ones(2))
    kept = layer.kept
    with attributes_kept([layer]):
        layer.width, layer.kept, layer.more = 5, inside_of(ops.ones(5)), inside_of(ops.ones(5))
    assert layer.width == 2 and layer.kept is kept and not hasattr(layer, "more")
