"""The order of samples: permutations, mixing of seed and epoch, seeking, and how positions are cut over replicas."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.control.exit_codes import DataError
from tfdist.data import order
from tfdist.data.batch_plan import BatchPlan

GOLDEN_10 = [3, 6, 0, 8, 5, 2, 7, 1, 4, 9]
GOLDEN_IMAGENET = [305638, 269312, 97548, 219426]
GOLDEN_SEEDS = [[-219072320, -1982463729], [1611681672, 481537808]]


def samples(positions, size, seed=0, shuffle=True) -> np.ndarray:
    return order.sample_of(tf.constant(np.asarray(positions, np.int64)), size, seed, shuffle).numpy()


@pytest.mark.parametrize("size", [1, 2, 3, 10, 97, 1797, 60_000])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_holds_every_sample_once(size, shuffle):
    epochs = 3 if size < 2000 else 1
    found = samples(np.arange(epochs * size), size, shuffle=shuffle).reshape(epochs, size)
    np.testing.assert_array_equal(np.sort(found, axis=1), np.tile(np.arange(size), (epochs, 1)))


@pytest.mark.parametrize("size", [2**16 - 1, 2**16, 2**16 + 1, 2**17 + 1, 2**18 + 1])
def test_permutation_at_sizes_where_the_kernel_changes_its_block_size(size):
    # With 2**16 + 1 and 2**18 + 1 samples the kernel alone returns one sample twice and the last one never.
    np.testing.assert_array_equal(np.sort(samples(np.arange(size), size)), np.arange(size))


def test_any_chunk_of_positions_gives_the_same_samples_as_the_whole():
    whole = samples(np.arange(300), 97)  # spans four epochs
    for start, stop in [(0, 1), (90, 100), (96, 98), (150, 300)]:
        np.testing.assert_array_equal(samples(np.arange(start, stop), 97), whole[start:stop])
    np.testing.assert_array_equal(samples(np.arange(300)[::-1], 97), whole[::-1])


def test_far_positions():
    for first in (10**9, 2**62 - 1000):
        start = first // 97 * 97  # an epoch's first position
        np.testing.assert_array_equal(np.sort(samples(start + np.arange(97), 97)), np.arange(97))
        np.testing.assert_array_equal(samples([first], 97, shuffle=False), [first % 97])
    assert samples([2**62], 2**40)[0] < 2**40


def test_seed_and_epoch_are_mixed_well():
    size, epochs = 97, 40
    orders = [
        tuple(row) for seed in range(10) for row in samples(np.arange(epochs * size), size, seed).reshape(epochs, size)
    ]
    assert len(set(orders)) == 400  # in particular (seed 1, epoch 0) is not (seed 0, epoch 1)
    # Two orders agree in as many places as two random ones do: 1 of 97 on average.
    rows = np.array(orders)
    agreements = [np.mean(rows[a] == rows[b]) for a in range(0, 400, 7) for b in range(a + 1, 400, 13)]
    assert 0.5 / size < np.mean(agreements) < 1.5 / size
    # Each sample comes at each place equally often: a chi-square, whose expectation is 96 * 96.
    counts = np.zeros((size, size))
    np.add.at(counts, (np.tile(np.arange(size), 400), rows.ravel()), 1)
    assert np.sum((counts - 400 / size) ** 2 / (400 / size)) < 96 * 96 * 1.1


@pytest.mark.parametrize("size", [60_000, 2**16, 2**20])
def test_shuffled_order_has_no_serial_structure(size):
    # The public tf.random.experimental.index_shuffle fails this by far: its correlations reach 0.3 to 0.9.
    n = 2**16 if size > 2**16 else size // 64 * 64
    x = samples(np.arange(n), size, seed=3) / size - 0.5
    for distance in range(1, 65):
        correlation = np.mean(x[:-distance] * x[distance:]) * 12
        assert abs(correlation) < 5.5 / np.sqrt(n), distance
    variance = x.reshape(-1, 64).mean(1).var() * 12 * 64
    assert 0.8 < variance < 1.2


def test_order_is_frozen():
    # A run that is resumed by a later version must go on in the same order: these values may never change.
    assert samples(np.arange(10), 10, seed=0).tolist() == GOLDEN_10
    assert samples([0, 1, 2, 10**9], 1_281_167, seed=1234).tolist() == GOLDEN_IMAGENET
    assert order.element_seeds(tf.constant([0, 1], tf.int64), 7).numpy().tolist() == GOLDEN_SEEDS


def test_traces_with_unknown_length():
    traced = tf.function(lambda p: order.sample_of(p, 97, 5, True), input_signature=[tf.TensorSpec([None], tf.int64)])
    np.testing.assert_array_equal(traced(tf.range(50, 150, dtype=tf.int64)), samples(np.arange(50, 150), 97, seed=5))


@pytest.mark.parametrize("size", [0, -1, 2**40 + 1])
def test_size_out_of_range(size):
    with pytest.raises(DataError, match=str(size)):
        samples([0], size)


def test_element_seeds_differ_by_position_and_seed():
    seeds = np.concatenate([order.element_seeds(tf.range(5000, dtype=tf.int64), s).numpy() for s in range(3)])
    assert len(np.unique(seeds, axis=0)) == 15_000
    assert len(np.unique(seeds[:, 0])) > 14_990  # either half alone is a good seed as well


def test_uniform_is_uniform_and_draws_are_independent():
    seeds = order.element_seeds(tf.range(20_000, dtype=tf.int64), 0)
    a, b = order.uniform(seeds, 0).numpy(), order.uniform(seeds, 1).numpy()
    assert a.min() >= 0 and a.max() < 1 and abs(a.mean() - 0.5) < 0.01 and abs(a.var() * 12 - 1) < 0.03
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.03 and abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.03
    assert set(order.uniform_int(seeds, 0, 3).numpy()) == {0, 1, 2}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_positions_of_all_replicas_make_up_the_global_batches(data):
    accumulation, replicas = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    plan = BatchPlan(data.draw(st.integers(accumulation * replicas, 80)), accumulation, replicas)
    consumed, step = data.draw(st.integers(0, 2**50)), data.draw(st.integers(0, 2**20))
    per_replica = [order.micro_positions(plan, replica, consumed) for replica in range(replicas)]
    found = [
        positions(tf.constant([step * accumulation + micro], tf.int64)).numpy()
        for micro in range(accumulation)
        for positions in per_replica
    ]
    first = consumed + step * plan.global_batch
    np.testing.assert_array_equal(np.concatenate(found), np.arange(first, first + plan.global_batch))
    lengths = {len(part) for part in found}
    assert max(lengths) <= plan.micro_batch and min(lengths) >= 1 and max(lengths) - min(lengths) <= 1


def test_positions_of_several_micro_batches_at_once():
    plan = BatchPlan(24, 3, 2)
    positions = order.micro_positions(plan, 1, consumed=48)
    one_by_one = [positions(tf.constant([c], tf.int64)).numpy() for c in range(7)]
    np.testing.assert_array_equal(positions(tf.range(7, dtype=tf.int64)), np.concatenate(one_by_one))
    assert one_by_one[4].tolist() == list(range(48 + 24 + 8 + 4, 48 + 24 + 8 + 8))
