"""The order of a PyDataset's batches; arrays that are shuffled without a seed."""

import random
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from tfdist.compat import tensorflow_random
from tfdist.keras_fit.arrays import shuffle_alike
from tfdist.runtime.encoding import decode, encode
from tfdist.runtime.one_device import OneDevice


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


ROWS = 7
FLOATS, OTHERS = np.arange(ROWS * 2, dtype="float64").reshape(ROWS, 2), np.arange(ROWS * 3).reshape(ROWS, 3)
CLASSES, WEIGHTS = np.arange(ROWS) % 3, np.linspace(0.5, 2.0, ROWS)
GIVEN = {
    "x alone": {"x": FLOATS},
    "a list of one": {"x": [FLOATS], "y": CLASSES},
    "a list of equal shapes": {"x": [FLOATS, -FLOATS], "y": [CLASSES, CLASSES + 1]},
    "a list of unequal ones": {"x": [FLOATS, OTHERS], "y": (CLASSES, FLOATS)},
    "names": {"x": {"a": FLOATS, "b": OTHERS}, "y": {"p": CLASSES, "q": FLOATS}},
    "half precision": {"x": FLOATS.astype("float16"), "y": tf.constant(FLOATS, tf.float16)},
    "weights": {"x": FLOATS, "y": CLASSES, "sample_weight": WEIGHTS},
    "weights of some outputs": {"x": FLOATS, "y": [CLASSES, CLASSES], "sample_weight": [WEIGHTS, None]},
    "the same weights of all": {"x": FLOATS, "y": {"p": CLASSES, "q": FLOATS}, "sample_weight": WEIGHTS},
    "weights of some classes": {"x": FLOATS, "y": CLASSES, "class_weight": {1: 4.0}},
    "weights of classes in columns": {"x": FLOATS, "y": np.eye(3)[CLASSES], "class_weight": {0: 2.0, 2: 4.0}},
}


def of_keras(given):
    """One batch of all rows, in their order."""
    return next(iter(ArrayDataAdapter(**given, batch_size=ROWS).get_tf_dataset()))


def sorted_rows(batch):
    """The rows of all leaves in the order of the first."""
    order = np.argsort(keras.tree.flatten(batch)[0].numpy()[:, 0])
    return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf.numpy()[order], batch)


def shuffled(given, monkeypatch, **options):
    monkeypatch.setattr(tensorflow_random, "users_state_digest", lambda: 0)  # no seed was set
    arguments = {
        "shuffle": True,
        **dict.fromkeys(["sample_weight", "class_weight", "batch_size", "steps_per_epoch"]),
        **{"validation_split": 0.0, "validation_data": None, "validation_batch_size": None},
        **{name: value for name, value in given.items() if name not in ("x", "y")},
        **options,
    }
    x, y = shuffle_alike(OneDevice(), given["x"], given.get("y"), arguments, None)
    assert y is None and arguments["sample_weight"] is None and arguments["class_weight"] is None
    return x, arguments


@pytest.mark.parametrize("name", GIVEN)
def test_arrays_without_a_seed_are_what_keras_makes_of_them(name, monkeypatch):
    found, _ = shuffled(GIVEN[name], monkeypatch, batch_size=ROWS)
    wanted = of_keras(GIVEN[name])
    (batch,) = list(found)
    if isinstance(wanted, tf.Tensor):
        batch, wanted = (batch,), (wanted,)
    keras.tree.assert_same_structure(batch, wanted)
    for one, other in zip(*(keras.tree.flatten(sorted_rows(each)) for each in (batch, wanted)), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


def test_what_is_held_back_to_validate_is_keras_last_part(monkeypatch):
    given = {"x": FLOATS, "y": [CLASSES, FLOATS], "sample_weight": [WEIGHTS, None]}
    found, arguments = shuffled(given, monkeypatch, validation_split=0.3, batch_size=2)
    assert sorted(row[0] for x, *_ in found for row in x.numpy()) == FLOATS[:4, 0].tolist()
    x, (one, two), (weights, none) = arguments["validation_data"]
    assert none is None and x.dtype == two.dtype == weights.dtype == np.float32
    for part, whole in ((x, FLOATS), (one, CLASSES), (two, FLOATS), (weights, WEIGHTS.astype("float32"))):
        np.testing.assert_array_equal(part, whole[4:])


class ArrayLike:
    """As of pandas, JAX and torch."""

    shape, dtype = OTHERS.shape, OTHERS.dtype

    def __array__(self, dtype=None, copy=None):
        return OTHERS.astype(dtype or OTHERS.dtype)


@pytest.mark.parametrize("x", [ArrayLike(), tf.Variable(OTHERS)], ids=["array like", "variable"])
@pytest.mark.parametrize("shuffle", [True, 1])
def test_each_epoch_has_an_order_of_its_own(x, shuffle, monkeypatch):
    found, _ = shuffled({"x": x}, monkeypatch, shuffle=shuffle, batch_size=ROWS)
    epochs = [next(iter(found)).numpy()[:, 0].tolist() for _ in range(4)]
    assert len(set(map(tuple, epochs))) > 1 and all(sorted(rows) == OTHERS[:, 0].tolist() for rows in epochs)


@pytest.mark.parametrize("x", [tf.sparse.from_dense(OTHERS), tf.RaggedTensor.from_tensor(OTHERS)])
def test_what_is_not_dense_is_left_to_who_refuses_it(x, monkeypatch):
    monkeypatch.setattr(tensorflow_random, "users_state_digest", lambda: 0)
    found, _ = shuffle_alike(OneDevice(), x, None, {"shuffle": True, "sample_weight": None}, None)
    assert found is x


def test_rows_are_shuffled_within_their_batches(monkeypatch):
    rows = np.arange(90)[:, None]
    found, _ = shuffled({"x": rows}, monkeypatch, shuffle="batch", batch_size=40)
    epochs = [[batch.numpy()[:, 0].tolist() for batch in found] for _ in range(2)]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert [sorted(batch) for batch in epoch] == [list(range(40)), list(range(40, 80)), list(range(80, 90))]


def test_arrays_without_a_row_are_keras_to_refuse(monkeypatch):
    found, _ = shuffled({"x": FLOATS[:0], "y": CLASSES[:0]}, monkeypatch, batch_size=2)
    assert list(found) == []


def test_weights_of_classes_do_not_weigh_what_is_held_back(monkeypatch):
    given = {"x": FLOATS, "y": CLASSES, "class_weight": {0: 3.0}}
    _, arguments = shuffled(given, monkeypatch, validation_split=0.3)
    assert len(arguments["validation_data"]) == 2
