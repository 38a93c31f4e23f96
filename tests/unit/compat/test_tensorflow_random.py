"""TensorFlow's global random state, lent and given back."""

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tfdist.compat import tensorflow_random
from tfdist.compat.tensorflow_random import seed_lent, state_digest, users_state_digest


@pytest.fixture(autouse=True)
def _state_kept():
    with tensorflow_random.attribute_replaced(context.context(), "_seed", None):
        yield


def drawn():
    return float(tf.random.normal([]))


def test_a_seed_is_lent_and_nothing_of_it_stays():
    values = []
    for _ in range(2):
        with seed_lent(5, anew=True):
            assert state_digest() and not users_state_digest()
            values.append(drawn())
        assert tensorflow_random.global_seed() is None and not state_digest()
    tf.random.set_seed(5)
    assert values == [drawn()] * 2 and users_state_digest() == state_digest()


def test_the_users_own_seed_goes_on_where_it_was():
    tf.random.set_seed(3)
    wanted = [drawn(), drawn()]
    tf.random.set_seed(3)
    first = drawn()
    with seed_lent(3, anew=True):
        drawn()
        assert not users_state_digest()
    assert [first, drawn()] == wanted


def test_a_seed_that_is_set_meanwhile_is_the_users():
    with seed_lent(5, anew=False):
        tf.random.set_seed(6)
        assert users_state_digest()
    assert tensorflow_random.global_seed() == 6
