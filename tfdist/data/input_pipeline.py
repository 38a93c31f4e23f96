"""From a split to micro-batches: order + source -> tf.data, batched, augmented, prefetched.

A batch is (x, y, w): x and y nests of tensors with leading dim n, w the float32 weights, [n] or [n, T].

What a batch of 32, 64, 256 costs, all threads and the consuming loop on one core together (60,000 images of 8x8,
shuffled): 40, 46, 75 us, against 104, 148, 422 us for `from_tensor_slices().shuffle(10000).repeat().batch()`. Made one
by one and not in blocks of BLOCK it is 105, 105, 140 us. Above BLOCK_BYTES blocks cost more than they save: 128 images
of 32x32x3 take 271 us one by one and 398 us in blocks, 32 of them 154 and 106 us.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfdist.control.exit_codes import DataError
from tfdist.data import augment as augmentation
from tfdist.data import order
from tfdist.data.batch_plan import BatchPlan
from tfdist.data.sources.split import Sample, Split

BLOCK = 8  # micro-batches made in one go, if samples are cheap
BLOCK_BYTES = 2**19  # and a micro-batch is not larger
STREAM_WINDOW = 1024  # samples of a stream that are kept in memory and shuffled among themselves
STREAM_WINDOW_BYTES = 2**28  # fewer, if they would take more memory


def stream_cut(split: Split, plan: BatchPlan) -> int:
    """Into how many streams a run with this plan cuts a split: into as many as there are replicas, if it is a stream of
    files enough and they take equal parts of each batch; else 1, which is not at all."""
    can = split.size is None and 1 < plan.replicas <= split.stream_shards and plan.even
    return plan.replicas if can else 1


def train_dataset(
    split: Split,
    *,
    plan: BatchPlan,
    replica: int,
    seed: int,
    shuffle: bool,
    consumed: int,
    augment: augmentation.Augmentation | None = None,
    threads: int = 0,
    cut: int | None = None,
) -> tf.data.Dataset:
    """The endless micro-batches of one replica: step 0 micro-batch 0, step 0 micro-batch 1, ..., counted from
    `consumed`.

    `consumed` is reached in constant time; it need not be a multiple of the global batch. n is static if the plan is
    even.
    augment: see augment.py. threads: batches made at the same time; 0: tf.data tunes it.

    Streams (split.size None) know no order. The stream is shuffled within windows of STREAM_WINDOW samples (fewer if
    they are large), repeated, and cut by position, so that the global batches are the same at any number of replicas;
    every replica reads (and decodes) all of it, and `consumed` is reached by reading on. If the stream can be cut into
    enough shards (files), each replica reads and repeats its own: less reading, but which samples make a batch then
    depends on `cut`, the number of shards, and shards of different length end their passes at different times. None: as
    `stream_cut` says. A run keeps its cut: with another number of replicas, each reads all the shards and takes its
    part of the same batches. A cut anew would begin in the middle of other shards: some samples would come twice in a
    pass, others never.
    """
    if split.size is None:
        cut = stream_cut(split, plan) if cut is None else cut
        dataset = _stream_batches(split, plan, replica, seed, shuffle, consumed, augment, cut)
    else:
        dataset = _indexed_batches(split, plan, replica, seed, shuffle, consumed, augment, threads)
    return dataset.prefetch(tf.data.AUTOTUNE).with_options(_options())


def batch_fetch(
    split: Split, *, seed: int, shuffle: bool, augment: augmentation.Augmentation | None = None
) -> Callable[[tf.Tensor], Sample]:
    """positions int64 [n] in the data order -> the batch (x, y, w) there, as `train_dataset` makes it.

    For a split with random access.
    """
    fetch = augmentation.augmented_fetch(split, augment)
    shaped = _shaper(None, split.element_spec if augment is None else None)

    def batch(positions: tf.Tensor) -> Sample:
        samples = order.sample_of(positions, split.size, seed, shuffle)
        return shaped(*_weighted(fetch(samples, order.element_seeds(positions, seed)), tf.shape(positions)[0]))

    return batch


def eval_dataset(
    split: Split, *, batch: int, replica: int, replicas: int, limit: int = 0
) -> tuple[tf.data.Dataset, int]:
    """The evaluation batches of one replica, and their number, which is the same on all replicas.

    Step s, replica r takes samples s * batch * replicas + r * batch + (0..batch-1), in plain order: each of the first
    `limit` samples (0: all) exactly once over all replicas. Rows beyond them repeat sample 0 with w == 0; a replica may
    have nothing else. Raises DataError if there is no sample.

    A stream is counted first, by reading it through once if tf.data does not know its length; then every replica reads
    all of it and keeps its share.
    """
    width = batch * replicas
    shaped = _shaper(batch, split.element_spec)
    if split.size is None:
        size = _stream_length(split, limit)
        steps = -(-size // width)
        dataset = _stream_eval(split, size, steps, batch, replica, width).map(_plain(shaped))
    else:
        size = min(limit or split.size, split.size)
        steps = -(-size // width)

        def eval_batch(step: tf.Tensor) -> Sample:
            index = step * width + replica * batch + tf.range(batch, dtype=tf.int64)
            real = index < size
            x, y, w = _weighted(split.fetch(tf.where(real, index, 0)), batch)
            return shaped(x, y, _masked(w, real))

        dataset = tf.data.Dataset.range(steps).map(_plain(eval_batch), num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.prefetch(tf.data.AUTOTUNE).with_options(_options()), steps


def _plain(function: Callable) -> Callable:
    """The function as it is, not rewritten by AutoGraph, which would bury our errors in an error of its own."""
    return tf.autograph.experimental.do_not_convert(function)


def _options() -> tf.data.Options:
    options = tf.data.Options()
    options.deterministic = True
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return options


def _indexed_batches(
    split: Split,
    plan: BatchPlan,
    replica: int,
    seed: int,
    shuffle: bool,
    consumed: int,
    augment: augmentation.Augmentation | None,
    threads: int,
) -> tf.data.Dataset:
    """The micro-batches of a split with random access, made in blocks of several where that is cheaper."""
    small = plan.micro_batch * split.sample_bytes <= BLOCK_BYTES
    block = BLOCK if split.cheap and small and plan.even and not split.fixed else 1
    positions = order.micro_positions(plan, replica, consumed)
    fetch = augmentation.augmented_fetch(split, augment)
    shaped = _shaper(block * plan.micro_batch if plan.even else None, split.element_spec if augment is None else None)

    def make(first: tf.Tensor) -> Sample:
        at = positions(first + tf.range(block, dtype=tf.int64))
        samples = order.sample_of(at, split.size, seed, shuffle)
        batch = shaped(*_weighted(fetch(samples, order.element_seeds(at, seed)), tf.shape(at)[0]))
        return batch if block == 1 else tf.nest.map_structure(in_block, batch)

    def in_block(t: tf.Tensor) -> tf.Tensor:
        return tf.reshape(t, [block, plan.micro_batch, *t.shape[1:]])

    dataset = tf.data.Dataset.counter(step=block, dtype=tf.int64)
    if split.fixed:
        return dataset.take(plan.accumulation).map(_plain(make)).cache().repeat()
    dataset = dataset.map(_plain(make), num_parallel_calls=threads or tf.data.AUTOTUNE)
    return dataset if block == 1 else dataset.unbatch()


def _weighted(sample: Sample, rows: int | tf.Tensor) -> Sample:
    """(x, y) -> (x, y, ones [rows]); (x, y, w) stays."""
    return sample if len(sample) == 3 else (*sample, tf.ones([rows], tf.float32))


def _masked(w: tf.Tensor, real: tf.Tensor) -> tf.Tensor:
    """w with 0 in the rows (first dim) that are not real. `where`, not a product: the weight there may be anything."""
    real = tf.reshape(real, tf.concat([tf.shape(real), tf.ones([tf.rank(w) - 1], tf.int32)], 0))
    return tf.where(real, tf.cast(w, tf.float32), 0.0)


def _shaper(rows: int | None, spec: tuple | None) -> Callable[..., Sample]:
    """(x, y, w) -> the same with static shapes, which Python sources lose: `rows`, then as in `spec` if given."""

    def shaped(x, y, w):
        if spec is None:
            tf.nest.map_structure(lambda t: t.set_shape([rows, *t.shape[1:]]), (x, y, w))
        else:
            full = (*spec, tf.TensorSpec([], tf.float32))[:3]
            tf.nest.map_structure(lambda t, s: t.set_shape([rows, *s.shape]), (x, y, w), full)
        return x, y, w

    return shaped


def _stream_batches(
    split: Split,
    plan: BatchPlan,
    replica: int,
    seed: int,
    shuffle: bool,
    consumed: int,
    augment: augmentation.Augmentation | None,
    cut: int,
) -> tf.data.Dataset:
    """The micro-batches of a stream: numbered samples, the replica's own among them, cut to the plan's lengths."""
    bounds = [plan.slice(micro, replica) for micro in range(plan.accumulation)]
    lengths = [stop - start for start, stop in bounds]
    if plan.global_batch % cut or (cut > 1 and cut > split.stream_shards):
        raise DataError(
            f"{split.name}: this run has read the stream in {cut} parts, one for each worker that it began with, but"
            f" there are {split.stream_shards} files now and --global_batch={plan.global_batch}: go on with the files,"
            " and the batch, that it began with."
        )
    if cut == plan.replicas and plan.even:
        numbered = _shard(split, replica, cut, seed, shuffle, consumed // cut)
    else:
        starts, stops = (list(ends) for ends in zip(*bounds, strict=True))

        def is_own(position: tf.Tensor, _) -> tf.Tensor:
            offset = position % plan.global_batch
            return tf.reduce_any((offset >= starts) & (offset < stops))

        own = ordered_stream(split, plan, seed, shuffle, consumed, cut).enumerate().filter(is_own)
        numbered = own.map(lambda _, numbered: numbered)

    shaped = _shaper(plan.micro_batch if plan.even else None, split.element_spec if augment is None else None)

    def finish(numbers: tf.Tensor, sample: Sample) -> Sample:
        if augment is not None:
            sample = augmentation.apply(augment, sample, order.element_seeds(numbers, seed), split.name)
        return shaped(*_weighted(sample, tf.shape(numbers)[0]))

    batched = numbered.batch(sum(lengths)).rebatch(lengths) if len(set(lengths)) > 1 else numbered.batch(lengths[0])
    return batched.map(_plain(finish), num_parallel_calls=tf.data.AUTOTUNE)


def _shard(split: Split, shard: int, cut: int, seed: int, shuffle: bool, own: int) -> tf.data.Dataset:
    """One of `cut` shards of a stream, endless, from its own sample number `own` on: (number, sample). No two shards
    share a number, so that no two samples share an augmentation."""
    stream = split.stream(shard, cut)
    if not list(stream.take(1)):  # repeated, it would end at once, on this replica alone
        raise DataError(
            f"{split.name} has no samples for replica {shard} of {cut}: check --source_args and --data_dir."
        )
    endless = _window_shuffled(stream, split.sample_bytes, seed) if shuffle else stream.repeat()
    return endless.enumerate().skip(own).map(lambda i, sample: (i * cut + shard, sample))


def ordered_stream(split: Split, plan: BatchPlan, seed: int, shuffle: bool, consumed: int, cut: int) -> tf.data.Dataset:
    """All the shards of a stream as one, (number, sample): global batch after global batch, each with equal parts of
    all shards, from `consumed` on.
    """
    shards = [_shard(split, shard, cut, seed, shuffle, consumed // cut) for shard in range(cut)]
    if cut == 1:
        return shards[0]
    parts = (
        plan.accumulation * cut
    )  # of a global batch: those of the first micro-batch, then those of the second, as `cut` replicas take them
    rows = plan.global_batch // (parts if plan.global_batch % parts == 0 else cut)
    return tf.data.Dataset.choose_from_datasets(
        shards,
        tf.data.Dataset.range(cut).flat_map(lambda shard: tf.data.Dataset.from_tensors(shard).repeat(rows)).repeat(),
    )


def _window_shuffled(stream: tf.data.Dataset, sample_bytes: int, seed: int) -> tf.data.Dataset:
    """The stream, endless, each window of it in an order made of (seed, number of the window).

    Not Dataset.shuffle: its order depends on TensorFlow's global seed as well, which may differ between workers; they
    would then take some samples twice and others never.
    """
    size = max(1, min(STREAM_WINDOW, STREAM_WINDOW_BYTES // max(1, sample_bytes)))

    def shuffled(number: tf.Tensor, window: Sample) -> Sample:
        rows = tf.shape(tf.nest.flatten(window)[0], tf.int64)[0]
        keys = order.element_seeds(number * size + tf.range(rows), seed)[:, 0]
        permutation = tf.argsort(keys, stable=True)
        return tf.nest.map_structure(lambda t: tf.gather(t, permutation), window)

    windows = stream.batch(size).repeat().enumerate()
    return windows.map(_plain(shuffled)).unbatch()


def _stream_length(split: Split, limit: int) -> int:
    stream = split.stream(0, 1)
    known = int(stream.cardinality())
    if known == tf.data.INFINITE_CARDINALITY and not limit:
        raise DataError(f"{split.name} is an endless stream: set --eval_samples, the number of samples to evaluate on.")
    if known < 0:
        stream = stream.take(limit) if limit else stream
        known = int(stream.reduce(tf.constant(0, tf.int64), lambda count, _: count + 1))
    size = min(limit or known, known)
    if size < 1:
        raise DataError(f"{split.name} is an empty stream: check --source, --source_args and --data_dir.")
    return size


def _stream_eval(split: Split, size: int, steps: int, batch: int, replica: int, width: int) -> tf.data.Dataset:
    stream = split.stream(0, 1)
    padded = stream.take(size).concatenate(stream.take(1).repeat()).take(steps * width).enumerate()

    def finish(index: tf.Tensor, sample: Sample) -> Sample:
        x, y, w = _weighted(sample, batch)
        return x, y, _masked(w, index < size)

    own = padded.filter(lambda index, _: index % width // batch == replica)
    return own.batch(batch, drop_remainder=True).map(_plain(finish))
