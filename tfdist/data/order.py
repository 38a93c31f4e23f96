"""The order of samples as a pure function: (seed, position) -> sample, and (plan, replica, counter) -> positions.

Terms. *position*: how many samples were taken before this one, over all workers and epochs (int64, 0 to 2**62).
*epoch* = position // size. *sample*: an index into the split, 0 to size - 1. n: number of requested positions, >= 1.

All functions are stateless index arithmetic on tensors. They run eagerly, in a tf.function and in a tf.data map, cost
the same at position 0 and at position 10**9, and do not depend on the number of workers. Each replica asks for the
positions of its own slice, so every sample is taken exactly once per epoch at any number of workers.

Why not `tf.random.experimental.index_shuffle` itself: it fixes the cipher at 4 rounds, at which neighbors in the
shuffled order are strongly correlated (60,000 samples: correlation -0.31 at distance 2; 2**20 samples: the means of
batches of 64 have 1/50 of the variance of random ones). Here the same kernel is called with `ROUNDS` rounds.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfdist.control.exit_codes import DataError
from tfdist.data.batch_plan import BatchPlan

# From 10 rounds on, serial correlation (distances 1 to 199), parity correlation and the variance of batch means are
# indistinguishable from those of random permutations, for 50,000 to 10**9 samples. A round costs about 5 ns a position.
ROUNDS = 12
MAX_SIZE = 2**40  # above it, the kernel's choice of the block size depends on floating-point rounding

# SplitMix64 (Steele, Lea and Flood 2014, doi 10.1145/2660193.2660195): a counter times _GOLDEN, then finalized.
_GOLDEN = 0x9E3779B97F4A7C15
# Give different uses different random numbers although all start from one seed.
_ORDER, _ELEMENT, _DRAW = 0x6F72646572, 0x656C656D656E74, 0x64726177


def sample_of(positions: tf.Tensor, size: int, seed: int, shuffle: bool) -> tf.Tensor:
    """Returns the sample at each position: a new permutation of 0..size-1 per epoch, or 0..size-1 again and again.

    Args: positions int64 [n], which may span epochs; size, samples in the split, 1 to MAX_SIZE; seed, any integer.
    Returns int64 [n]. Raises DataError if size is out of range.
    """
    if not 1 <= size <= MAX_SIZE:
        raise DataError(f"A split of {size} samples has no order: the size must be from 1 to {MAX_SIZE}.")
    positions = tf.convert_to_tensor(positions, tf.int64)
    index = tf.math.floormod(positions, size)
    if not shuffle or size == 1:
        return index
    epoch = positions // size
    halves = 2 * epoch[:, None] + tf.constant([0, 1], tf.int64)
    return _permute(index, _hash(_fold(seed, _ORDER), halves), size)  # 128 bits, of which the cipher uses 96


def element_seeds(positions: tf.Tensor, seed: int) -> tf.Tensor:
    """Returns a seed per position for `tf.random.stateless_*`, `tf.image.stateless_*`: int64 [n] -> int32 [n, 2]."""
    return tf.bitcast(_hash(_fold(seed, _ELEMENT), tf.convert_to_tensor(positions, tf.int64)), tf.int32)


def uniform(seeds: tf.Tensor, draw: int) -> tf.Tensor:
    """Returns random number `draw` of each seed: int32 [n, 2] -> float32 [n] in [0, 1), multiples of 2**-24.

    Handles a whole batch at once; one stateless random operation per sample would be slow.
    """
    bits = _hash(tf.bitcast(seeds, tf.uint64) ^ _u64(_DRAW), tf.constant(draw, tf.int64))
    return tf.cast(tf.cast(tf.bitwise.right_shift(bits, _u64(40)), tf.int32), tf.float32) * 2.0**-24


def uniform_int(seeds: tf.Tensor, draw: int, limit: int) -> tf.Tensor:
    """Returns uniform integers, int32 [n] in 0..limit-1, drawn like those of `uniform`; limit: up to 2**24."""
    return tf.minimum(tf.cast(uniform(seeds, draw) * float(limit), tf.int32), limit - 1)


def micro_positions(plan: BatchPlan, replica: int, consumed: int) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a function counters -> positions: what `replica` takes in micro-batches `counters`, from `consumed` on.

    Micro-batch c belongs to step c // accumulation. counters: int64 [m]; m must be 1 unless the plan is even. The
    positions are int64 [m * n]; n is static if the plan is even.
    """
    bounds = [plan.slice(micro, replica) for micro in range(plan.accumulation)]
    starts = [start for start, _ in bounds]
    lengths = [stop - start for start, stop in bounds]

    def positions(counters: tf.Tensor) -> tf.Tensor:
        step, micro = counters // plan.accumulation, tf.math.floormod(counters, plan.accumulation)
        first = consumed + step * plan.global_batch + tf.gather(tf.constant(starts, tf.int64), micro)
        length = plan.micro_batch if plan.even else tf.gather(tf.constant(lengths, tf.int64), micro[0])
        return tf.reshape(first[:, None] + tf.range(length, dtype=tf.int64), [-1])

    return positions


def _permute(index: tf.Tensor, keys: tf.Tensor, size: int) -> tf.Tensor:
    """Permutes 0..size-1 for each key: the Simon block cipher with cycle walking (see the kernel's source).

    index int64 [n]; keys uint64 [n, 2].
    """
    keys = tf.reshape(tf.bitcast(keys, tf.int32), [-1, 4])[:, :3]
    largest = size - 1
    # The kernel takes ceil(log2(largest)) bits, made even and at least 16. That is one bit too few if `largest` is
    # itself an even power of two, for example with 65,537 samples: one sample would come twice and one never. In that
    # case 0..size is permuted, and the additional element is skipped.
    bits = largest.bit_length() - 1
    short = largest == 2**bits and bits % 2 == 0 and bits >= 16

    def cipher(values: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.RandomIndexShuffle(
            index=values, seed=keys, max_index=tf.constant(size if short else largest, tf.int64), rounds=ROUNDS
        )

    image = cipher(index)
    if not short:
        return image
    return tf.where(image == size, cipher(tf.fill(tf.shape(index), tf.constant(size, tf.int64))), image)


def _u64(value: int) -> tf.Tensor:
    return tf.constant(value % 2**64, tf.uint64)


def _fold(seed: int, use: int) -> tf.Tensor:
    """Returns where the random numbers of a use start. In Python, because it is the same for all positions."""
    return _u64(_finalize_int(_finalize_int(seed % 2**64) ^ use))


def _hash(start: tf.Tensor, counter: tf.Tensor) -> tf.Tensor:
    """Returns SplitMix64's counter-th output from `start`; both broadcast. start uint64, counter int64 -> uint64."""
    return _finalize(start + (tf.bitcast(counter, tf.uint64) + _u64(1)) * _u64(_GOLDEN))


def _finalize(z: tf.Tensor) -> tf.Tensor:
    """SplitMix64's finalizer, a bijection on uint64 in which every input bit affects every output bit."""
    shift = tf.bitwise.right_shift
    z = (z ^ shift(z, _u64(30))) * _u64(0xBF58476D1CE4E5B9)
    z = (z ^ shift(z, _u64(27))) * _u64(0x94D049BB133111EB)
    return z ^ shift(z, _u64(31))


def _finalize_int(z: int) -> int:
    """The same finalizer in Python, for a number from 0 to 2**64 - 1."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31
