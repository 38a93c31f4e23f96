"""Workers that hold different data are told so before they train; those that hold the same pass, whatever kind of data
it is.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from tfdist.config import Config
from tfdist.control.exit_codes import DataError
from tfdist.data import checksums, contents
from tfdist.data.contents import must_be_same_data
from tfdist.data.sources.objects import object_split
from tfdist.data.sources.split import Split, array_split


class Workers:
    """`all_gather` between threads, each a worker."""

    def __init__(self, size):
        self.size, self.rows, self.barrier = size, [None] * size, threading.Barrier(size, timeout=20)

    def runtime(self, rank):
        class Runtime:
            size = self.size

            def all_gather(_, array):
                self.rows[rank] = array
                self.barrier.wait()
                found = np.stack(self.rows)
                self.barrier.wait()
                return found

        return Runtime()


def compared(*splits):
    """What each worker is told about its split; "" if all is well."""
    workers, told = Workers(len(splits)), [None] * len(splits)

    def work(rank):
        try:
            must_be_same_data(workers.runtime(rank), splits[rank])
            told[rank] = ""
        except DataError as error:
            told[rank] = str(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(splits))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(told)) == 1  # all come to the same verdict, or some would wait for the others
    return told[0]


X, Y = np.random.default_rng(0).normal(size=(300, 8)).astype(np.float32), np.arange(300) % 4


def shuffled(seed):
    order = np.random.default_rng(seed).permutation(300)
    return X[order], Y[order]


class Items:
    def __init__(self, x, y, noise=None):
        self.x, self.y, self.noise = x, y, noise

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + (self.noise.normal() if self.noise else 0), self.y[index]


def stream(x, y):
    data = tf.data.Dataset.from_tensor_slices((x, y))
    return Split("mine:data/train", None, data.element_spec, stream=lambda shard, shards: data.shard(shards, shard))


KINDS = {
    "arrays": lambda x, y: array_split("mine:data/train", (x, y)),
    "object": lambda x, y: object_split("mine:data/train", Items(x, y)),
    "stream": stream,
    "split of the user's": lambda x, y: Split(
        "mine:data/train",
        len(x),
        (tf.TensorSpec([8]), tf.TensorSpec([], tf.int64)),
        lambda at: (tf.gather(x, at), tf.gather(y, at)),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_split_that_is_drawn_without_a_seed(kind):
    make = KINDS[kind]
    assert compared(make(*shuffled(1)), make(*shuffled(1)), make(*shuffled(1))) == ""
    sentence = compared(make(*shuffled(1)), make(*shuffled(1)), make(*shuffled(2)))
    assert (
        sentence.startswith("Rank 2 and rank 0 have different samples")
        and "in mine:data/train" in sentence
        and "np.random.default_rng(0)" in sentence
    )
    assert compared(*[make(*shuffled(seed)) for seed in (1, 2, 3)]).startswith("Rank 1, 2 and rank 0")
    labels = compared(make(X, Y), make(X, Y[::-1].copy()))  # the same x
    assert labels.startswith("Rank 1 and rank 0 have different samples")


def test_sizes_and_types():
    make = KINDS["arrays"]
    assert compared(make(X, Y), make(X[:299], Y[:299])).startswith(
        "Rank 1 has 299 samples in mine:data/train, rank 0 has 300"
    )
    assert "have different samples" in compared(make(X, Y), make(X, Y.astype(np.float32)))
    assert "have different samples" in compared(make(X, Y), array_split("mine:data/train", (X, Y, np.ones(300))))


def test_streams_whose_sizes_are_known():
    """Their first samples are the same."""
    assert compared(stream(X, Y), stream(X[:299], Y[:299])).startswith(
        "Rank 1 has 299 samples in mine:data/train, rank 0 has 300"
    )
    before = contents.identity(stream(X, Y))
    shorter = stream(X[:299], Y[:299])
    now = contents.identity(shorter)
    assert contents.changed(shorter, before, now) == "mine:data/train had 300 samples, and has 299 samples"
    assert contents.changed(shorter, {**before, "stream_size": None}, now) == (
        "mine:data/train had no known number of samples, and has 299 samples"
    )
    before.pop("stream_size")  # of a snapshot of an earlier version
    assert contents.changed(shorter, before, now) == ""


def test_one_element_of_an_array_is_enough():
    """Images with black borders: the first rows, the last ones, and most of the rest are the same."""
    x = np.zeros([300, 28, 28, 1], np.uint8)
    other = x.copy()
    other[137, 14, 14] = 1
    assert compared(array_split("a", (x, Y)), array_split("a", (other, Y))).startswith("Rank 1")
    weights = np.ones(300, np.float32)
    assert compared(
        array_split("a", (X, Y, weights)), array_split("a", (X, Y, np.where(np.arange(300) == 5, 2, weights)))
    ).startswith("Rank 1")
    assert compared(array_split("a", (X.astype(str), Y)), array_split("a", ((X + 1).astype(str), Y))).startswith(
        "Rank 1"
    )


def test_large_arrays_are_sampled(monkeypatch):
    monkeypatch.setattr(checksums, "FULL_BYTES", 1000)
    monkeypatch.setattr(checksums, "PART_BYTES", 640)
    make = KINDS["arrays"]
    assert compared(make(*shuffled(1)), make(*shuffled(1))) == ""
    assert compared(make(*shuffled(1)), make(*shuffled(2))).startswith("Rank 1")
    last = X.copy()
    last[-1] = 0
    assert compared(make(X, Y), make(last, Y)).startswith("Rank 1")


def test_noise_that_is_drawn_at_each_reading_is_no_difference():
    noisy = [object_split("a", Items(X, Y, np.random.default_rng())) for _ in range(2)]
    assert compared(*noisy) == ""
    assert compared(noisy[0], object_split("a", Items(*shuffled(2), np.random.default_rng()))).startswith(
        "Rank 1"
    )  # its labels


def test_a_stream_that_is_shuffled_at_each_pass():
    def split(seed):
        data = tf.data.Dataset.from_tensor_slices((X, np.arange(300))).shuffle(300, seed=seed)
        return Split("a", None, data.element_spec, stream=lambda shard, shards: data)

    assert compared(split(1), split(2)).startswith("Rank 1")


CLASSES = np.arange(300) // 150  # the first samples are all of one class


def test_a_stream_comes_in_one_order_whatever_its_options_say():
    anyhow = tf.data.Options()
    anyhow.deterministic = False
    slow_first = tf.data.Dataset.range(8).map(slow_if_first, num_parallel_calls=8).with_options(anyhow)
    for how in ({"stream": lambda *_: slow_first}, {"records": lambda *_: slow_first, "decode": lambda x: (x, x)}):
        split = Split("mine", None, (tf.TensorSpec([], tf.int64),) * 2, **how)
        assert (
            split.stream(0, 1).options().deterministic and (split.records or split.stream)(0, 1).options().deterministic
        )
        assert contents.read_twice(split).shows_order


def slow_if_first(number):
    def waited(number):
        time.sleep(0.02 * (number == 0))
        return number

    return tf.ensure_shape(tf.numpy_function(waited, [number], tf.int64), [])


def noisy_stream(x, y, anew=False):
    """x differs at each reading, and so does the order (anew)."""
    chance = np.random.default_rng()

    def rows():
        order = chance.permutation(300) if anew else np.arange(300)
        return x[order] + chance.normal(size=[300, 1]).astype(np.float32), y[order]

    data = tf.data.Dataset.range(1).map(lambda _: tf.numpy_function(rows, [], [tf.float32, tf.int64]))
    data = data.map(lambda x, y: (tf.ensure_shape(x, [300, 8]), tf.ensure_shape(y, [300]))).unbatch()
    return Split("mine:data/train", None, data.element_spec, stream=lambda shard, shards: data)


def test_a_part_whose_first_samples_are_alike_does_not_show_their_order():
    """It is the same whatever the order is."""
    ones = np.ones(300, np.int64)
    for y in (ones, CLASSES):
        first, second = noisy_stream(X, y, anew=True), noisy_stream(X, y, anew=True)
        assert not contents.read_twice(first).shows_order
        assert compared(first, second).startswith("Rank 1 and rank 0 have different samples")
        assert "other samples" in contents.changed(first, contents.identity(first), contents.identity(first))


def test_noise_in_a_stream_is_no_difference_where_another_part_shows_the_order():
    """Also where that takes more than the first 16 samples."""
    rare = (np.arange(300) == 290).astype(np.int64)
    for y in (Y, CLASSES, rare):
        assert compared(noisy_stream(X, y), noisy_stream(X, y)) == ""
        split = noisy_stream(X, y)
        before, now = contents.identity(split), contents.identity(split)
        assert before["checksums"] != now["checksums"] and contents.changed(split, before, now) == ""
    other = noisy_stream(X, CLASSES[::-1].copy())
    assert compared(noisy_stream(X, CLASSES), other).startswith("Rank 1")
    assert compared(stream(X, CLASSES), noisy_stream(X, CLASSES)) == ""  # one happens to draw nothing
    late = np.concatenate([CLASSES[:200], 1 - CLASSES[200:]])  # the first samples are the same
    before, now = contents.identity(noisy_stream(X, CLASSES)), contents.identity(noisy_stream(X, late))
    assert before["checksums"][1] == now["checksums"][1]  # of the first samples
    assert "another order" in contents.changed(noisy_stream(X, late), before, now)
    before.pop("first_samples")  # of a snapshot of an earlier version, which looked at the first samples only
    assert contents.changed(noisy_stream(X, late), before, now) == ""


def test_how_far_a_stream_is_read_depends_on_what_shows_its_order(monkeypatch):
    counts = []
    firsts = contents._columns
    monkeypatch.setattr(contents, "_columns", lambda split, count: counts.append(count) or firsts(split, count))

    def read(split):
        counts.clear()
        return contents.read_twice(split), counts[::2]

    assert read(stream(X, Y)) == (contents.read_twice(stream(X, Y)), [16])
    assert read(noisy_stream(X, Y))[1] == [16]  # four classes
    assert read(noisy_stream(X, np.arange(300) % 2))[1] == [16, 64]
    both, looked_at = read(noisy_stream(X, CLASSES))
    assert looked_at == [16, 64, 512] and both.steady == [False, True] and both.shows_order
    shuffled_anew = Split("a", None, stream(X, Y).element_spec, stream=lambda *_: stream(*shuffled(None)).stream(0, 1))
    both, looked_at = read(shuffled_anew)
    assert looked_at == [16] and not any(both.steady) and not both.shows_order
    constant = stream(np.ones([3, 8]), np.ones(3, np.int64))
    assert read(constant)[0].shows_order and read(constant)[1] == [16]  # nothing differs
    texts = stream(np.array([b"a", b"a\0"], object), np.zeros(2))
    assert contents._columns(texts, 2)[0][0] != contents._columns(texts, 2)[0][1]


def test_samples_of_many_parts():
    """As a table with a column for each feature."""
    columns = {f"column {number:02}": X[:, number % 8] + number for number in range(70)}

    class Rows(Items):
        def __getitem__(self, index):
            noise = self.noise.normal() if self.noise else 0.0
            return {name: column[index] for name, column in self.x.items()} | {"noise": noise}, self.y[index]

        def __len__(self):
            return 300

    def rows(y=Y):
        return object_split("mine:data/train", Rows(columns, y, np.random.default_rng()))

    assert compared(rows(), rows()) == ""
    assert compared(rows(), rows(Y[::-1].copy())).startswith("Rank 1 and rank 0 have different samples")


def test_a_stream_that_is_empty_on_one_worker():
    """It has no parts to compare, the others' have two."""
    data, noisy = (make(X, Y).stream(0, 1) for make in (stream, noisy_stream))
    some, none = (  # whose lengths TensorFlow does not know
        Split("mine:data/train", None, data.element_spec, stream=lambda *_, kept=kept: kept)
        for kept in (noisy.filter(lambda x, y: y < 4), data.filter(lambda x, y: y > 3))
    )
    assert compared(some, none).startswith("Rank 1 and rank 0 have different samples")


def test_a_part_that_the_data_have_gained_is_a_change():
    kinds = [array_split("a", (X, Y)), object_split("a", Items(X, Y)), stream(X, Y)]
    weights = np.ones(300, np.float32)
    samples = list(zip(X, Y, weights, strict=True))
    longer = tf.data.Dataset.from_tensor_slices((X, Y, weights))
    gained = [
        array_split("a", (X, Y, weights)),
        object_split("a", samples),
        Split("a", None, longer.element_spec, stream=lambda *_: longer),
    ]
    for before, now in zip(kinds, gained, strict=True):
        assert "other samples" in contents.changed(now, contents.identity(before), contents.identity(now))
        assert "other samples" in contents.changed(before, contents.identity(now), contents.identity(before))


def test_the_users_function_finds_the_same_seeds_whatever_ran_before(tmp_path, monkeypatch):
    (tmp_path / "unseeded_split.py").write_text(
        "import random, numpy as np, tensorflow as tf\ndef data(split):\n    order = np.random.permutation(40)[:30] if"
        " split == 'train' else np.random.permutation(40)[30:]\n    return np.stack([order, [random.random()] *"
        " len(order), tf.random.uniform([len(order)]).numpy()], 1), order % 4\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from tfdist.build import _load_splits
    from tfdist.runtime.one_device import OneDevice

    def loaded():
        return [
            split.fetch(tf.range(split.size, dtype=tf.int64))[0].numpy()
            for split in _load_splits(Config().replace(source="unseeded_split:data", seed=3), OneDevice)
        ]

    first = loaded()
    np.random.normal(size=7), tf.random.uniform([3])
    for a, b in zip(first, loaded(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert sorted([*first[0][:, 0], *first[1][:, 0]]) == list(range(40))  # nothing that is trained on is evaluated on
