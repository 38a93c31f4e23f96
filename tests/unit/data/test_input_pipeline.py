"""The pipeline: exactly once, the same global batches at any number of replicas, seeking, evaluation, streams."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.marks import slow_but
from tfdist.control.exit_codes import DataError
from tfdist.data import input_pipeline, order, streams
from tfdist.data.batch_plan import BatchPlan
from tfdist.data.sources.split import Split, array_split

# The sizes of data set and global batch, micro-batches, replicas: neither always divides the batch.
PLANS = [(97, 10, 1, 3), (97, 10, 2, 5), (97, 64, 3, 2), (1797, 64, 1, 5)]


def numbered(size: int, **changes) -> Split:
    """A split whose x says which sample it is."""
    split = array_split("numbered", (np.arange(size), np.arange(size, dtype=np.int32) % 10))
    return dataclasses.replace(split, **changes)


def stream(size: int, **changes) -> Split:
    """The same as a stream."""

    def make(shard: int, shards: int) -> tf.data.Dataset:
        return tf.data.Dataset.range(size).shard(shards, shard).map(lambda i: (i, tf.cast(i % 10, tf.int32)))

    return dataclasses.replace(numbered(size), size=None, fetch=None, stream=make, **changes)


def micro_batches(
    split: Split, plan: BatchPlan, replica: int, count: int, *, seed=3, shuffle=True, consumed=0, **options
) -> list:
    dataset = input_pipeline.train_dataset(
        split,
        input_pipeline.Reading(seed=seed, shuffle=shuffle, **options),
        plan=plan,
        replica=replica,
        consumed=consumed,
    )
    return [tuple(part.numpy() for part in batch) for batch in dataset.take(count)]


def global_batches(
    split: Split, global_batch: int, accumulation: int, replicas: int, steps: int, **options
) -> np.ndarray:
    """Which samples make each global batch [steps, global_batch], in the order of (micro-batch, replica, row)."""
    plan = BatchPlan(global_batch, accumulation, replicas)
    found = [micro_batches(split, plan, replica, steps * accumulation, **options) for replica in range(replicas)]
    in_order = [
        found[r][s * accumulation + m][0] for s in range(steps) for m in range(accumulation) for r in range(replicas)
    ]
    return np.concatenate(in_order).reshape(steps, global_batch)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "global_batch", "accumulation", "replicas"), PLANS)
def test_same_global_batches_and_every_sample_once_an_epoch_at_any_number_of_replicas(
    size, global_batch, accumulation, replicas
):
    steps = -(-2 * size // global_batch)  # two epochs and the rest of a batch, so batches straddle epochs
    alone = global_batches(numbered(size), global_batch, accumulation, 1, steps)
    np.testing.assert_array_equal(global_batches(numbered(size), global_batch, accumulation, replicas, steps), alone)
    epochs = alone.reshape(-1)[: 2 * size].reshape(2, size)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(size), (2, 1)))
    assert (epochs[0] != epochs[1]).any()
    if accumulation > 1:  # whatever it is
        np.testing.assert_array_equal(alone, global_batches(numbered(size), global_batch, 1, 1, steps))


@pytest.mark.parametrize(
    ("replicas", "consumed"), [(1, 0), (2, 64 * 3), (1, 10**9 // 64 * 64), (3, 10**9 + 7), (5, 2**60)]
)
def test_seek_gives_what_the_order_says(replicas, consumed):
    found = global_batches(numbered(97), 64, 1, replicas, 2, consumed=consumed)
    expected = order.sample_of(tf.range(consumed, consumed + 128, dtype=tf.int64), 97, 3, True)
    np.testing.assert_array_equal(found.reshape(-1), expected)


def test_resuming_in_the_middle_continues_the_sequence():
    plan = BatchPlan(12, 2, 2)
    whole = micro_batches(numbered(97), plan, 1, 40)
    resumed = micro_batches(numbered(97), plan, 1, 40 - 2 * 5, consumed=5 * 12)
    for (x, y, w), (x2, y2, w2) in zip(whole[10:], resumed, strict=True):
        assert (x == x2).all() and (y == y2).all() and (w == w2).all()


def test_without_shuffle_the_order_is_plain():
    np.testing.assert_array_equal(
        global_batches(numbered(10), 4, 1, 2, 5, shuffle=False).reshape(-1), np.arange(20) % 10
    )


def test_seed_changes_the_order():
    assert (
        global_batches(numbered(97), 16, 1, 1, 2, seed=1) != global_batches(numbered(97), 16, 1, 1, 2, seed=2)
    ).any()


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_blocks_and_threads_do_not_change_batches(threads):
    plan = BatchPlan(16, 2, 2)
    alone = micro_batches(numbered(97, cheap=False), plan, 1, 30, threads=1)
    blocks = micro_batches(numbered(97, cheap=True), plan, 1, 30, threads=threads)
    assert all((a[0] == b[0]).all() and (a[1] == b[1]).all() for a, b in zip(alone, blocks, strict=True))


def test_labels_and_weights_go_with_their_samples():
    weights = np.arange(97, dtype=np.float32)[:, None] + np.array([0.0, 0.5], np.float32)
    split = array_split("weighted", ({"a": np.arange(97), "b": np.arange(97) * 2}, np.arange(97) * 3, weights))
    for x, y, w in input_pipeline.train_dataset(
        split, input_pipeline.Reading(seed=0, shuffle=True), plan=BatchPlan(10, 1, 1), replica=0, consumed=0
    ).take(20):
        assert (x["b"] == 2 * x["a"]).numpy().all() and (y == 3 * x["a"]).numpy().all()
        np.testing.assert_array_equal(w, weights[x["a"].numpy()])


def test_static_shapes():
    split = array_split("images", (np.zeros([9, 4, 4, 1], np.float32), np.zeros(9, np.int32)))
    for accumulation, replicas, rows in [(1, 2, 6), (2, 3, 2), (1, 5, None), (5, 1, None)]:
        plan = BatchPlan(12, accumulation, replicas)
        dataset = input_pipeline.train_dataset(
            split, input_pipeline.Reading(seed=0, shuffle=True), plan=plan, replica=0, consumed=0
        )
        x, y, w = dataset.element_spec
        assert (x.shape.as_list(), y.shape.as_list(), w.shape.as_list()) == ([rows, 4, 4, 1], [rows], [rows])
        assert w.dtype == tf.float32
    evaluation, _ = input_pipeline.eval_dataset(split, batch=4, replica=0, replicas=2)
    assert [s.shape.as_list() for s in evaluation.element_spec] == [[4, 4, 4, 1], [4], [4], [4]]


@pytest.mark.parametrize("consumed", [0, 40])
def test_fixed_split_repeats_its_first_batches(consumed):
    found = micro_batches(numbered(97, fixed=True), BatchPlan(10, 2, 1), 0, 6, consumed=consumed)
    np.testing.assert_array_equal(found[0][0], micro_batches(numbered(97), BatchPlan(10, 2, 1), 0, 1)[0][0])
    assert (
        (found[0][0] == found[2][0]).all() and (found[1][0] == found[5][0]).all() and (found[0][0] != found[1][0]).any()
    )


@pytest.mark.parametrize("make", [numbered, stream])
@pytest.mark.parametrize("replicas", slow_but([1, 2, 3, 5], 1, 3))
@pytest.mark.parametrize(("size", "batch", "limit"), [(97, 10, 0), (97, 10, 50), (3, 4, 100)])
def test_evaluation_takes_every_sample_once(make, replicas, size, batch, limit):
    seen, all_steps = [], set()
    for replica in range(replicas):
        dataset, steps = input_pipeline.eval_dataset(
            make(size), batch=batch, replica=replica, replicas=replicas, limit=limit
        )
        batches = list(dataset.as_numpy_iterator())
        assert len(batches) == steps and all(len(part) == batch for parts in batches for part in parts)
        all_steps.add(steps)
        for x, y, w, real in batches:
            assert (w == real).all() and (x[w == 0] == 0).all() and (y == x % 10).all()
            seen += x[w == 1].tolist()
    assert all_steps == {-(-min(size, limit or size) // (batch * replicas))}
    assert sorted(seen) == list(range(min(size, limit or size)))


@pytest.mark.parametrize("make", [numbered, stream])
@pytest.mark.parametrize(("size", "rows"), [(97, [10] * 9 + [7]), (20, [10, 10]), (3, [3])])
def test_evaluation_of_one_replica_need_not_be_filled(make, size, rows):
    """What mixes the rows of a batch would see those that fill the last one."""
    dataset, steps = input_pipeline.eval_dataset(make(size), batch=10, replica=0, replicas=1, filled=False)
    batches = list(dataset.as_numpy_iterator())
    assert steps == len(batches) and [len(x) for x, *_ in batches] == rows
    assert all(len(x) == len(y) == len(w) and (w == 1).all() and real.all() for x, y, w, real in batches)
    assert np.concatenate([x for x, *_ in batches]).tolist() == list(range(size))


def test_evaluation_masks_weights_a_token():
    weights = np.full([5, 3], np.nan, np.float32)
    weights[1:] = np.arange(12).reshape(4, 3)
    split = array_split("tokens", (np.arange(5), np.arange(5), weights))
    (_, _, first, _), (x, _, last, real) = input_pipeline.eval_dataset(split, batch=4, replica=0, replicas=1)[
        0
    ].as_numpy_iterator()
    np.testing.assert_array_equal(first, weights[:4])
    np.testing.assert_array_equal(last, np.vstack([weights[4], np.zeros([3, 3])]))  # no NaN from the repeated sample 0
    assert x.tolist() == [4, 0, 0, 0] and real.tolist() == [True, False, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("size", "global_batch", "accumulation"), [(23, 10, 3), (50, 12, 2)])
def test_stream_has_the_same_global_batches_at_any_number_of_replicas(size, global_batch, accumulation, shuffle):
    steps = -(-2 * size // global_batch)
    alone = global_batches(stream(size), global_batch, accumulation, 1, steps, shuffle=shuffle)
    np.testing.assert_array_equal(
        global_batches(stream(size), global_batch, accumulation, 3, steps, shuffle=shuffle), alone
    )
    epochs = alone.reshape(-1)[: 2 * size].reshape(2, size)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(size), (2, 1)))
    resumed = global_batches(
        stream(size), global_batch, accumulation, 2, steps - 2, shuffle=shuffle, consumed=2 * global_batch
    )
    np.testing.assert_array_equal(resumed, alone[2:])
    if shuffle:
        assert (epochs[0] != epochs[1]).any() and (epochs[0] != np.arange(size)).any()


def test_order_does_not_depend_on_the_global_seed_which_differs_between_workers():
    for make in (numbered, stream):
        found = []
        for global_seed in (1, 2):
            tf.random.set_seed(global_seed)
            found.append(global_batches(make(23), 10, 1, 1, 5))
        np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(("limit", "value"), [("STREAM_WINDOW", 8), ("STREAM_WINDOW_BYTES", 8 * (8 + 4))])
def test_stream_longer_than_a_window(monkeypatch, limit, value):
    monkeypatch.setattr(streams, limit, value)
    found = global_batches(stream(30), 10, 1, 2, 6).reshape(2, 30)
    np.testing.assert_array_equal(np.sort(found, axis=1), np.tile(np.arange(30), (2, 1)))
    assert (found[0] != found[1]).any() and (found // 8 == np.arange(30) // 8).all()


def test_stream_cut_by_shards():
    split = stream(24, stream_shards=4)
    found = [np.concatenate([x for x, _, _ in micro_batches(split, BatchPlan(8, 1, 2), r, 6)]) for r in range(2)]
    for replica, own in enumerate(found):  # two passes over its own half, nothing of the other's
        np.testing.assert_array_equal(np.sort(own.reshape(2, 12), axis=1), np.tile(np.arange(replica, 24, 2), (2, 1)))
    resumed = micro_batches(split, BatchPlan(8, 1, 2), 1, 3, consumed=24)
    np.testing.assert_array_equal(np.concatenate([x for x, _, _ in resumed]), found[1][12:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cut", "replicas", "accumulation", "window"),
    [(2, 1, 1, 1024), (2, 3, 1, 8), (3, 1, 2, 8), (4, 2, 3, 1024), (2, 4, 1, 8)],
)
def test_a_stream_keeps_its_cut_when_it_goes_on_with_other_workers(monkeypatch, cut, replicas, accumulation, window):
    """The same global batches, with the same augmentation, as on the workers that it began with; so each sample once a
    pass.
    """
    monkeypatch.setattr(streams, "STREAM_WINDOW", window)

    def draw(x, y, seeds):
        return tf.stack([tf.cast(x, tf.float32), order.uniform(seeds, 0)], 1), y

    split = stream(48, stream_shards=12)

    def run(replicas, accumulation, steps, consumed):
        plan = BatchPlan(24, accumulation, replicas)
        found = [
            np.concatenate(
                [
                    x
                    for x, _, _ in micro_batches(
                        split, plan, r, steps * accumulation, consumed=consumed, cut=cut, augment=draw
                    )
                ]
            )
            for r in range(replicas)
        ]
        parts = [part.reshape(steps, -1, 2) for part in found]
        return np.concatenate(parts, axis=1)

    def in_any_order(batches):
        return [sorted(map(tuple, batch)) for batch in batches.tolist()]

    assert streams.stream_cut(split, BatchPlan(24, 1, cut)) == cut
    whole = run(cut, 1, 4, 0)
    assert in_any_order(run(replicas, accumulation, 3, 24)) == in_any_order(whole[1:])
    np.testing.assert_array_equal(np.sort(whole[:2, :, 0].reshape(-1)), np.arange(48))
    if accumulation == 1 and cut > 1:  # the cut it would have taken anew is another one, and would have read some twice
        assert in_any_order(
            np.concatenate([micro_batches(split, BatchPlan(24, 1, 1), 0, 1, consumed=24, cut=1, augment=draw)[0][0]])[
                None
            ]
        ) != in_any_order(whole[1:2])


def test_a_stream_is_cut_only_into_equal_parts():
    """Of the batch, and of the files: who reads two of four files would have ended his pass when others begin theirs a
    second time."""
    for shards, cuts in ((12, [1, 2, 3, 4, 1, 6]), (4, [1, 2, 1, 4, 1, 1]), (1, [1] * 6)):
        split = stream(48, stream_shards=shards)
        assert [streams.stream_cut(split, BatchPlan(24, 1, replicas)) for replicas in range(1, 7)] == cuts
    split = stream(48, stream_shards=4)
    assert streams.stream_cut(split, BatchPlan(24, 5, 2)) == streams.stream_cut(numbered(48), BatchPlan(24, 1, 2)) == 1
    for files in (3, 6):
        with pytest.raises(DataError, match=f"has read the stream in 4 parts.* {files} files now"):
            micro_batches(stream(48, stream_shards=files), BatchPlan(24, 1, 2), 0, 1, cut=4)


def test_empty_stream_does_not_end_silently():
    with pytest.raises(DataError, match="no samples for replica 0 of 1"):
        micro_batches(stream(0), BatchPlan(2, 1, 1), 0, 1)


def test_streams_that_cannot_be_evaluated():
    endless = dataclasses.replace(stream(5), stream=lambda *_: stream(5).stream(0, 1).repeat())
    with pytest.raises(DataError, match="--eval_samples"):
        input_pipeline.eval_dataset(endless, batch=2, replica=0, replicas=1)
    dataset, steps = input_pipeline.eval_dataset(endless, batch=2, replica=0, replicas=1, limit=7)
    assert steps == 4 and sum(w.sum() for _, _, w, _ in dataset.as_numpy_iterator()) == 7
    with pytest.raises(DataError, match="empty"):
        input_pipeline.eval_dataset(stream(0), batch=2, replica=0, replicas=1)
    of_unknown_length = dataclasses.replace(
        stream(5), stream=lambda *_: stream(9).stream(0, 1).filter(lambda x, y: x < 5)
    )
    assert input_pipeline.eval_dataset(of_unknown_length, batch=2, replica=0, replicas=1)[1] == 3


@pytest.mark.slow
def test_augmentation_sees_the_same_seeds_at_any_number_of_replicas():
    def draw(x, y, seeds):
        return tf.cast(x, tf.float32) + order.uniform(seeds, 0), y

    for make in (numbered, stream):
        alone = global_batches(make(23), 12, 2, 1, 5, augment=draw)
        np.testing.assert_array_equal(global_batches(make(23), 12, 2, 3, 5, augment=draw), alone)
        assert len(set(alone.reshape(-1).tolist())) == 60  # a sample's second epoch differs from its first
        np.testing.assert_array_equal(global_batches(make(23), 12, 2, 2, 3, augment=draw, consumed=24), alone[2:])


def test_options():
    for dataset in (
        input_pipeline.train_dataset(
            numbered(9), input_pipeline.Reading(seed=0, shuffle=True), plan=BatchPlan(3, 1, 1), replica=0, consumed=0
        ),
        input_pipeline.eval_dataset(numbered(9), batch=3, replica=0, replicas=1)[0],
    ):
        assert dataset.options().deterministic
        assert dataset.options().experimental_distribute.auto_shard_policy == tf.data.experimental.AutoShardPolicy.OFF
        # Else an iterator that is let go may hold Python's lock for up to a minute (data/tuning.py).
        assert dataset.options().autotune.enabled is False


def test_iterates_inside_a_tf_function():
    dataset = input_pipeline.train_dataset(
        numbered(97), input_pipeline.Reading(seed=0, shuffle=True), plan=BatchPlan(8, 1, 1), replica=0, consumed=0
    )

    @tf.function
    def total(iterator, steps):
        result = tf.constant(0, tf.int64)
        for _ in tf.range(steps):
            result += tf.reduce_sum(next(iterator)[0])
        return result

    expected = itertools.islice(dataset.as_numpy_iterator(), 20)
    assert total(iter(dataset), tf.constant(20)).numpy() == sum(x.sum() for x, _, _ in expected)


@pytest.mark.parametrize("make", [numbered, stream])
def test_batches_brought_to_a_device_ahead_of_use_are_the_same(make):
    dataset = input_pipeline.train_dataset(
        make(97), input_pipeline.Reading(seed=3, shuffle=True), plan=BatchPlan(10, 1, 1), replica=0, consumed=20
    )
    ahead = input_pipeline.ahead_on(dataset, "/device:CPU:0")
    assert ahead.element_spec == dataset.element_spec and not ahead.options().autotune.enabled

    @tf.function
    def batch(iterator):
        return next(iterator)

    iterators = iter(ahead), iter(dataset)
    for _ in range(30):
        for found, expected in zip(*map(batch, iterators), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_errors_and_ends_come_through_from_ahead():
    def row(number):
        with tf.control_dependencies([tf.debugging.assert_less(number, tf.constant(2, tf.int64), "row 2 is bad")]):
            return tf.identity(number)

    found = iter(input_pipeline.ahead_on(tf.data.Dataset.range(3).map(row), "/device:CPU:0"))
    assert [int(next(found)), int(next(found))] == [0, 1]
    with pytest.raises(tf.errors.InvalidArgumentError, match="row 2 is bad"):
        next(found)
    assert list(input_pipeline.ahead_on(tf.data.Dataset.range(2), "/device:CPU:0").as_numpy_iterator()) == [0, 1]
