"""Whether another process reads data in the same order, and by which seeds they are shuffled."""

import json
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tests.unit.artifacts.test_data_position import NUMBERS, running
from tfdist.artifacts.backup_checks import refuse_lost_order
from tfdist.artifacts.data_order import no_order, seeded_shuffles, shuffled_by
from tfdist.compat import tensorflow_random
from tfdist.control.exit_codes import CheckpointError


@pytest.fixture(autouse=True)
def _random_state_kept():
    python = random.getstate()
    with tensorflow_random.attribute_replaced(context.context(), "_seed", None):
        yield
    random.setstate(python)


def read(data):
    """Keras' adapter of data that are shuffled, if Keras may."""
    return running(x=data, shuffle=not isinstance(data, tf.data.Dataset)).iterator.data_adapter


class Pages(keras.utils.PyDataset):
    @property
    def num_batches(self):
        return 3

    def __getitem__(self, index):
        return np.ones((4, 1)), np.ones((4, 1))


def test_batches_of_a_py_dataset_need_a_seed_of_python():
    def has_none():
        return no_order(read(Pages()))

    random.seed()
    assert has_none()
    tf.random.set_seed(3)
    assert has_none()
    keras.utils.set_random_seed(3)
    assert not has_none()
    keras.utils.clear_session(free_memory=False)
    numbers = list(range(5000))
    random.shuffle(numbers)
    assert not has_none()


def test_a_seed_that_workers_lend_each_other_is_not_the_users():
    random.seed()
    with tensorflow_random.seed_lent(5, anew=False):
        assert no_order(read(Pages()))
        assert no_order(read(np.ones((4, 1))))
    keras.utils.set_random_seed(3)
    with tensorflow_random.seed_lent(5, anew=False), tensorflow_random.seed_lent(6, anew=False):
        assert tensorflow_random.users_seed() == 3
        assert not no_order(read(Pages()))
    assert tensorflow_random.users_seed() == 3


def test_the_seed_of_shuffled_arrays_can_be_saved():
    tf.random.set_seed(np.int64(5))
    assert json.dumps(shuffled_by(read(np.ones((4, 1))))) == "[5]"


def test_shuffles_that_draw_the_next_order_for_each_iterator():
    once = NUMBERS.shuffle(7, seed=1, reshuffle_each_iteration=False)
    anew = NUMBERS.shuffle(7, seed=1)
    without_a_seed = NUMBERS.shuffle(7)
    for dataset, found in ((once, []), (anew, [anew]), (without_a_seed, []), (anew.map(lambda x: x).repeat(), [anew])):
        assert seeded_shuffles(read(dataset)) == found
    assert seeded_shuffles(read(np.ones((4, 1)))) == []


def permuted(number):
    return tf.data.Dataset.from_tensor_slices(tf.random.shuffle([number, 7, 8]))


# Orders that are not drawn by a shuffle of the data themselves.
DRAWN = {
    "shuffle in interleave": lambda: NUMBERS.interleave(lambda _: NUMBERS.shuffle(7), num_parallel_calls=2),
    "shuffle in flat_map": lambda: NUMBERS.flat_map(lambda _: NUMBERS.flat_map(lambda _: NUMBERS.shuffle(7))),
    "sample": lambda: tf.data.Dataset.sample_from_datasets([NUMBERS, NUMBERS]).batch(2),
    "random in flat_map": lambda: NUMBERS.flat_map(lambda _: tf.data.Dataset.random().take(2)),
    "rows of a batch": lambda: NUMBERS.batch(7).map(lambda x: tf.random.shuffle(x)).unbatch(),
    "rows in flat_map": lambda: NUMBERS.unbatch().flat_map(lambda x: permuted(x)),
}


@pytest.mark.parametrize("name", DRAWN)
def test_orders_that_functions_and_samples_draw_need_a_seed(name):
    assert no_order(read(DRAWN[name]())).why == "are shuffled without a seed"
    seeds = []
    for seed in (1, 1, 2):
        tf.random.set_seed(seed)
        data = read(DRAWN[name]())
        assert no_order(data) is None
        seeds.append(json.loads(json.dumps(shuffled_by(data))))
    assert seeds[0] == seeds[1] != seeds[2]


def test_what_functions_draw_for_a_sample_is_no_order():
    def augmented(x):
        return tf.random.shuffle([x, x]) + tf.random.uniform([], maxval=7, dtype=tf.int64)

    files = tf.data.Dataset.range(2)
    for data in (
        NUMBERS.map(augmented),
        NUMBERS.unbatch().map(augmented),
        NUMBERS.unbatch().map(augmented).batch(2).unbatch(),
        tf.data.Dataset.zip(NUMBERS, tf.data.Dataset.random()).map(lambda x, seed: x),
        files.interleave(lambda _: NUMBERS.map(augmented)),
    ):
        assert no_order(read(data)) is None and shuffled_by(read(data)) == []


def test_the_seeds_of_several_shuffles_in_functions_come_in_one_order():
    """Whatever the process has traced before: TensorFlow numbers the functions by that."""

    def inner(seed):
        return NUMBERS.flat_map(lambda _: NUMBERS.shuffle(7, seed=seed))

    seeds = []
    for traced in range(6):
        tf.function(lambda x: x).get_concrete_function(traced)
        tf.random.set_seed(1)
        seeds.append(shuffled_by(read(NUMBERS.flat_map(lambda _: tf.data.Dataset.zip(inner(1), inner(2))))))
    assert seeds == [[[1, 1], [1, 2]]] * 6


def test_seeds_that_a_backup_does_not_hold_are_not_known():
    fit = running(x=NUMBERS.interleave(lambda _: NUMBERS.shuffle(7, seed=3)))
    manifest, seeds = {"batch": 2, "epoch": 0, "ends": {}}, shuffled_by(fit.iterator.data_adapter)
    assert seeds and refuse_lost_order("backup", manifest, fit, 2, seeds) is None
    for other in ([], [*seeds, 4]):
        with pytest.raises(CheckpointError, match="with another seed"):
            refuse_lost_order("backup", {**manifest, "order_seeds": other}, fit, 2, seeds)


def test_a_seed_of_a_shuffle_in_a_function_is_enough():
    """Also one that is computed."""
    assert no_order(read(NUMBERS.interleave(lambda _: NUMBERS.shuffle(7, seed=3)))) is None
    assert no_order(read(NUMBERS.unbatch().flat_map(lambda x: NUMBERS.shuffle(7, seed=x)))) is None
