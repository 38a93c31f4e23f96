"""Streams: sources that can only be read from front to back. They do not follow the data order of order.py.

A stream is shuffled within windows of STREAM_WINDOW samples (fewer if they are large), repeated, and cut by position,
so that the global batches are the same at any number of replicas. Every replica reads all of it, decodes only its own
rows if the source has `records`, and reaches `consumed` by reading up to it. If the source says that the stream has
enough shards of equal length, each replica reads and repeats its own shards. That means less reading, but which
samples make a batch then depends on `cut`, the number of shards. (Shards of unequal length would end their passes at
different times: samples of short ones would come more often.) A run keeps its cut: with another number of replicas,
each replica reads all shards and takes its part of the same batches. A new cut would begin in the middle of other
shards: some samples would come twice in a pass, others never.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.control.exit_codes import DataError
from tfdist.data import augment as augmentation
from tfdist.data import order
from tfdist.data.batch_plan import BatchPlan
from tfdist.data.reading import Reading, as_is, masked, shaper, weighted
from tfdist.data.sources.split import Sample, Split

STREAM_WINDOW = 1024  # samples of a stream that are kept in memory and shuffled among themselves
STREAM_WINDOW_BYTES = 2**28  # upper limit on that memory: larger samples make smaller windows


def stream_cut(split: Split, plan: BatchPlan) -> int:
    """Returns the number of streams into which a run with this plan cuts a split: the number of replicas, if each gets
    equally many shards and takes an equal part of each batch; else 1, which means no cut."""
    can = split.size is None and plan.replicas > 1 and split.stream_shards % plan.replicas == 0 and plan.even
    return plan.replicas if can else 1


def stream_batches(split: Split, reading: Reading, plan: BatchPlan, replica: int, consumed: int) -> tf.data.Dataset:
    """Returns the micro-batches of a stream: numbers the samples, selects the replica's, cuts to the plan's lengths."""
    augment, cut = reading.augment, stream_cut(split, plan) if reading.cut is None else reading.cut
    bounds = [plan.slice(micro, replica) for micro in range(plan.accumulation)]
    lengths = [stop - start for start, stop in bounds]
    if plan.global_batch % cut or split.stream_shards % cut:
        raise DataError(
            f"{split.name}: this run has read the stream in {cut} parts, one for each worker that it started with, but"
            f" there are {split.stream_shards} files now and --global_batch={plan.global_batch}: both must be multiples"
            " of it. Resume with the files, and the batch, that it started with; with --source=tfrecord, add"
            " by_file=True to --source_args."
        )
    if cut == plan.replicas and plan.even:
        numbered = _shard(split, reading, replica, cut, consumed // cut)
    else:
        starts, stops = (list(ends) for ends in zip(*bounds, strict=True))

        def is_own(position: tf.Tensor, _) -> tf.Tensor:
            offset = tf.math.floormod(position, plan.global_batch)
            return tf.reduce_any((offset >= starts) & (offset < stops))

        own_samples = ordered_stream(split, plan, reading, consumed, cut).enumerate().filter(as_is(is_own))
        numbered = own_samples.map(as_is(lambda _, numbered: numbered))

    shaped = shaper(plan.micro_batch if plan.even else None, split.element_spec if augment is None else None)

    def finish(numbers: tf.Tensor, read: Any) -> Sample:
        sample = split.samples(read)
        if augment is not None:
            sample = augmentation.apply(augment, sample, order.element_seeds(numbers, reading.seed), split.name)
        return shaped(*weighted(sample, split, numbers))

    batched = (
        numbered.batch(sum(lengths)).rebatch(tf.constant(lengths, tf.int64))
        if len(set(lengths)) > 1
        else numbered.batch(lengths[0])
    )
    return batched.map(as_is(finish), num_parallel_calls=tf.data.AUTOTUNE)


def _shard(split: Split, reading: Reading, shard: int, cut: int, own_skipped: int) -> tf.data.Dataset:
    """Returns one of `cut` shards of a stream, endless, without its first `own_skipped` samples, as (number, argument
    of `Split.samples`). No two shards share a number, so that no two samples share an augmentation."""
    stream = (split.records or split.stream)(shard, cut)
    if not list(stream.take(1)):  # an empty stream, repeated, would end at once, on this replica alone
        raise DataError(
            f"{split.name} has no samples for replica {shard} of {cut}: check --source_args and --data_dir."
        )
    endless = _window_shuffled(stream, split.sample_bytes, reading.seed) if reading.shuffle else stream.repeat()
    return endless.enumerate().skip(own_skipped).map(as_is(lambda i, sample: (i * cut + shard, sample)))


def ordered_stream(split: Split, plan: BatchPlan, reading: Reading, consumed: int, cut: int) -> tf.data.Dataset:
    """Returns all shards of a stream as one, as (number, argument of `Split.samples`): global batch after global batch,
    each with equal parts of all shards, from `consumed` on.
    """
    shards = [_shard(split, reading, shard, cut, consumed // cut) for shard in range(cut)]
    if cut == 1:
        return shards[0]
    # A global batch has the rows of the first micro-batch, then those of the second, as `cut` replicas take them.
    parts = plan.accumulation * cut
    rows = plan.global_batch // (parts if plan.global_batch % parts == 0 else cut)
    return tf.data.Dataset.choose_from_datasets(
        shards,
        tf.data.Dataset.range(cut)
        .flat_map(as_is(lambda shard: tf.data.Dataset.from_tensors(shard).repeat(rows)))
        .repeat(),
    )


def _window_shuffled(stream: tf.data.Dataset, sample_bytes: int, seed: int) -> tf.data.Dataset:
    """Returns the stream, endless, each window of it in an order derived from (seed, number of the window).

    Not Dataset.shuffle: its order also depends on TensorFlow's global seed, which may differ between workers; they
    would then take some samples twice and others never.
    """
    size = max(1, min(STREAM_WINDOW, STREAM_WINDOW_BYTES // max(1, sample_bytes)))

    def shuffled(number: tf.Tensor, window: Any) -> Any:
        rows = tf.shape(tf.nest.flatten(window)[0], tf.int64)[0]
        keys = order.element_seeds(number * size + tf.range(rows), seed)[:, 0]
        permutation = tf.argsort(keys, stable=True)
        return tf.nest.map_structure(lambda t: tf.gather(t, permutation), window)

    windows = stream.batch(size).repeat().enumerate()
    return windows.map(as_is(shuffled)).unbatch()


def must_end(split: Split, limit: int) -> None:
    """Raises DataError if the whole split is to be evaluated on and is known to have no end."""
    if split.size is None and not limit:
        _known_length(split, split.stream(0, 1), limit)


def _known_length(split: Split, stream: tf.data.Dataset, limit: int) -> int:
    """Returns the length that TensorFlow knows; negative if unknown or (with a limit) endless. No limit: DataError."""
    known = int(stream.cardinality())
    if known == tf.data.INFINITE_CARDINALITY and not limit:
        raise DataError(f"{split.name} is an endless stream: set --eval_samples, the number of samples to evaluate on.")
    return known


def stream_length(split: Split, limit: int) -> int:
    """Returns how many samples of a stream there are to evaluate on. If tf.data does not know, the stream is read
    through and counted."""
    stream = (split.records or split.stream)(0, 1)
    known = _known_length(split, stream, limit)
    if known < 0:
        stream = stream.take(limit) if limit else stream
        known = int(stream.reduce(tf.constant(0, tf.int64), lambda count, _: count + 1))
    size = min(limit or known, known)
    if size < 1:
        raise DataError(f"{split.name} is an empty stream: check --source, --source_args and --data_dir.")
    return size


def stream_eval(split: Split, size: int, filled: int, batch: int, replica: int, width: int) -> tf.data.Dataset:
    """Returns batches (x, y, w, real). filled: the total number of samples; if the stream has fewer, its first sample
    is repeated with w == 0 and real == False."""
    stream = split.stream(0, 1)
    padded = stream.take(size).concatenate(stream.take(1).repeat()).take(filled).enumerate()

    def finish(index: tf.Tensor, sample: Sample) -> tuple:
        x, y, w = weighted(sample, split, index)
        return x, y, masked(w, index < size), index < size

    def is_own(index: tf.Tensor, _) -> tf.Tensor:
        return tf.equal(tf.math.floormod(index, width) // batch, replica)

    own_samples = padded.filter(as_is(is_own))
    return own_samples.batch(batch, drop_remainder=filled % batch == 0).map(as_is(finish))
