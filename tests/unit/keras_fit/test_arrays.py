"""The order of a PyDataset's batches."""

import random
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from tfdist.keras_fit.arrays import shuffle_alike
from tfdist.runtime.encoding import decode, encode


class Squares(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.full([2, 1], index), np.full([2, 1], index**2)


def drawn(seed, chief_state, digests, shuffle):
    """What a worker draws whose random numbers began with `seed`; all gather the `digests` of two workers."""
    random.seed(seed)
    runtime = SimpleNamespace(
        all_gather=lambda array: digests.append(array) or np.stack(digests),
        broadcast_object=lambda state, name: decode(encode(chief_state)),
    )
    arguments = {"shuffle": shuffle, "sample_weight": None}
    data = Squares()
    assert shuffle_alike(runtime, data, None, arguments, None) == (data, None)
    return random.random()


@pytest.fixture(autouse=True)
def state_kept():
    before = random.getstate()
    yield
    random.setstate(before)


def test_workers_draw_the_order_of_the_chief():
    random.seed(3)
    chief, digests = random.getstate(), []
    wanted = drawn(3, chief, digests, shuffle=True)
    assert drawn(4, chief, digests, shuffle=True) == wanted
    assert drawn(4, chief, [], shuffle=False) != wanted  # there is no order to draw
