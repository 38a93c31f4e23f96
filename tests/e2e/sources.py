"""Data sources of the end-to-end tests, given to tfdist as `tests.e2e.sources:NAME`."""

from __future__ import annotations

import json
import os
import time

import numpy as np
import tensorflow as tf

CLASSES = 4


def _samples(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    y = random.integers(0, CLASSES, count).astype("int32")
    return (np.eye(CLASSES, 8)[y] + random.normal(scale=0.5, size=(count, 8))).astype("float32"), y


def clean(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Four noisy clusters."""
    return _samples(600 if split == "train" else 101, seed=split == "train")


def with_overflow(split: str) -> tuple[np.ndarray, np.ndarray]:
    """The same, with one sample (number 70) that overflows in float16."""
    x, y = clean(split)
    if split == "train":
        x[70] = 1e30
    return x, y


def with_nan(split: str) -> tuple[np.ndarray, np.ndarray]:
    """The same, with one sample (number 70) that is not a number."""
    x, y = clean(split)
    if split == "train":
        x[70] = np.nan
    return x, y


def with_label_below_zero(split: str) -> tuple[np.ndarray, np.ndarray]:
    """The same, with one label (of sample 70) that is no class."""
    x, y = clean(split)
    if split == "train":
        y[70] = -1
    return x, y


def with_a_row_too_many(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers for `lookups`, one of which (of sample 70) is past the end of its table."""
    _, y = clean(split)
    ids = np.arange(6 * len(y), dtype=np.int32).reshape(-1, 6) % 10
    if split == "train":
        ids[70, 3] = 10
    return ids, y


def lookups(kind: str = "embedding"):
    """A model with a table of 10 rows. `kind`: what looks up its rows, one of OWN_LOOKUPS or a layer of Keras."""
    import keras

    ids = keras.Input((6,), dtype="int32")
    if kind in ("embedding", "frozen embedding"):
        rows = keras.layers.Embedding(10, 8, trainable=kind == "embedding")(ids)
    else:
        rows = own_lookup(kind)(ids)
    if kind == "pooled":
        rows = keras.layers.GlobalMaxPooling1D()(rows)  # XLA's maximum ignores NaN
    return keras.Model(ids, keras.layers.Dense(4)(keras.layers.Flatten()(rows)))


OWN_LOOKUPS = (
    "take",
    "gather_nd",
    "whole numbers",
    "bools",
    "embedding with a call of its own",
    "frozen weight",
    "pooled",
    "traced before",
)


def own_lookup(kind: str):
    """Returns a layer that looks up rows [..., 8] of a table of 10."""
    import keras

    class Own(keras.layers.Embedding):
        @tf.function
        def looked_up(self, ids):
            return tf.gather(self.embeddings.value, ids)

        def call(self, ids):
            if kind == "traced before":
                return self.looked_up(ids)  # while the model is made
            table = tf.convert_to_tensor(self.embeddings)
            if kind == "take":
                return keras.ops.take(table, ids, axis=0)
            if kind == "gather_nd":
                return tf.gather_nd(table, tf.cast(ids, tf.int64)[..., None])
            if kind in ("whole numbers", "bools"):
                numbers = tf.range(80)[::-1]
                found = tf.gather(tf.reshape(numbers if kind == "whole numbers" else numbers > 40, [10, 8]), ids)
                return tf.cast(found, table.dtype) / 80 + tf.reduce_mean(table)
            if kind in ("frozen weight", "pooled"):
                return tf.gather(tf.stop_gradient(self.embeddings.value), ids)
            return tf.nn.embedding_lookup(self.embeddings.value, ids)

    return Own(10, 8, trainable=kind not in ("frozen weight", "pooled"))


def all_nan(split: str) -> tuple[np.ndarray, np.ndarray]:
    """The same, but all training samples are NaN."""
    x, y = clean(split)
    return x * (np.nan if split == "train" else 1), y


def unseeded(split: str) -> tuple[np.ndarray, np.ndarray]:
    """The same samples in an order that each process draws by itself."""
    x, y = clean(split)
    order = np.random.default_rng().permutation(len(y))
    return x[order], y[order]


def seeded_by_the_run(split: str) -> tuple[np.ndarray, np.ndarray]:
    """The same samples in an order drawn by NumPy's global generator."""
    x, y = clean(split)
    order = np.random.permutation(len(y))
    return x[order], y[order]


def empty(split: str) -> tuple[np.ndarray, np.ndarray]:
    """No samples."""
    return np.zeros([0, 8], "float32"), np.zeros([0], "int32")


def identified(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Clusters whose targets are (class, number of the sample), for `identifying`."""
    x, y = clean(split)
    return x, np.stack([y % 2, np.arange(len(y))], 1).astype("float32")


def identified_with_nan(split: str) -> tuple[np.ndarray, np.ndarray]:
    """The same, with one sample (number 70) that is not a number."""
    x, y = identified(split)
    if split == "train":
        x[70] = np.nan
    return x, y


@tf.autograph.experimental.do_not_convert  # there is nothing to convert, which each trace would take long to see
def identifying(outputs, y, w):
    """An objective whose metrics are checksums of the samples in a batch: they show whether two runs saw the same
    global batches.
    """
    from tfdist.training.objectives import Scores

    number = tf.cast(y[:, 1], tf.int32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=tf.cast(y[:, 0], tf.int32), logits=outputs[:, :2])
    # Small whole numbers: their float32 sums are exact in any order.
    return Scores(
        losses,
        w,
        {
            "first_checksum": tf.cast(number * 7919 % 1009, tf.float32),
            "second_checksum": tf.cast(number * number % 997, tf.float32),
        },
    )


class SlowOnRankOne:
    """Reads a sample in 5 ms on the worker of rank 1, at once on the others."""

    def __init__(self, split: str):
        self.x, self.y = clean(split)
        self.pause = 0.005 if split == "train" and '"index": 1' in os.environ.get("TF_CONFIG", "") else 0.0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        time.sleep(self.pause)
        return self.x[index], self.y[index]


class Slow(SlowOnRankOne):
    """Reads a training sample in 3 ms on every worker."""

    def __init__(self, split: str):
        super().__init__(split)
        self.pause = 0.003 if split == "train" else 0.0


class LostEvaluation(Slow):
    """One evaluation sample cannot be read on any worker; nothing reads this sample before an evaluation."""

    ranks = ("0", "1")

    def __init__(self, split: str):
        super().__init__(split)
        self.split, self.pause = split, 0.0

    def __getitem__(self, index: int):
        rank = str(json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index", 0))
        if self.split == "eval" and index == 64 and rank in self.ranks:
            raise OSError("the disk is gone")
        return super().__getitem__(index)


class LostEvaluationOfOne(LostEvaluation):
    """The same, on the second worker alone."""

    ranks = ("1",)


def endless_evaluation(split: str):
    """Clusters whose evaluation split has no end."""
    data = tf.data.Dataset.from_tensor_slices(clean(split))
    return data.repeat() if split == "eval" else data
