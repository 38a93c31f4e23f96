"""The order of samples as a pure function: (seed, position) -> sample, and (plan, replica, counter) -> positions.

Legend. *position*: how many samples were taken before this one, over all workers and epochs (int64, 0 to 2**62).
*epoch* = position // size. *sample*: an index into the split, 0 to size - 1. n: positions asked for, at least 1.

Everything here is stateless index arithmetic on tensors: it runs eagerly, in a tf.function and in a tf.data map, costs
the same at position 0 and at position 10**9, and does not know how many workers there are. Each replica asks for the
positions of its own slice, so every sample is taken exactly once an epoch at any number of workers.

Why not `tf.random.experimental.index_shuffle` itself: it fixes the cipher at 4 rounds, at which neighbours in the
shuffled order are strongly correlated (60,000 samples: correlation -0.31 at distance 2; 2**20 samples: the means of
batches of 64 have a 50th of the variance of random ones). Here the same kernel is called with `ROUNDS` rounds.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfdist.control.exit_codes import DataError
from tfdist.data.batch_plan import BatchPlan

# From 10 rounds on, serial correlation (distances 1 to 199), parity correlation and the variance of batch means could
# not be told from those of random permutations, for 50,000 to 10**9 samples. A round costs about 5 ns a position.
ROUNDS = 12
MAX_SIZE = 2**40  # beyond, the kernel's choice of the block size is at the mercy of floating point

# SplitMix64 (Steele, Lea and Flood 2014, doi 10.1145/2660193.2660195): a counter times _GOLDEN, then finalised.
_GOLDEN = 0x9E3779B97F4A7C15
# Keeps the random numbers of different uses apart although they start from one seed.
_ORDER, _ELEMENT, _DRAW = 0x6F72646572, 0x656C656D656E74, 0x64726177


def sample_of(positions: tf.Tensor, size: int, seed: int, shuffle: bool) -> tf.Tensor:
    """The sample at each position: a new permutation of 0..size-1 in each epoch, or the plain order again and again.

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
    return _permute(index, _hash(_fold(seed, _ORDER), halves), size)  # 128 bits, of which the cipher takes 96


def element_seeds(positions: tf.Tensor, seed: int) -> tf.Tensor:
    """A seed for each position, for `tf.random.stateless_*` and `tf.image.stateless_*`: int64 [n] -> int32 [n, 2]."""
    return tf.bitcast(_hash(_fold(seed, _ELEMENT), tf.convert_to_tensor(positions, tf.int64)), tf.int32)


def uniform(seeds: tf.Tensor, draw: int) -> tf.Tensor:
    """The draw-th random number of each seed: int32 [n, 2] -> float32 [n] in [0, 1), multiples of 2**-24.

    For whole batches at once, where one stateless random operation a sample would be slow.
    """
    bits = _hash(tf.bitcast(seeds, tf.uint64) ^ _u64(_DRAW), tf.constant(draw, tf.int64))
    return tf.cast(tf.cast(tf.bitwise.right_shift(bits, _u64(40)), tf.int32), tf.float32) * 2.0**-24


def uniform_int(seeds: tf.Tensor, draw: int, limit: int) -> tf.Tensor:
    """Uniform integers, int32 [n] in 0..limit-1, drawn as `uniform` draws; limit up to 2**24."""
    return tf.minimum(tf.cast(uniform(seeds, draw) * float(limit), tf.int32), limit - 1)


def micro_positions(plan: BatchPlan, replica: int, consumed: int) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns counters -> positions: what `replica` takes in its micro-batches `counters`, counted from `consumed` on.

    Micro-batch c belongs to step c // accumulation. counters: int64 [m], m = 1 unless the plan is even. The positions
    are int64 [m * n]; n is static if the plan is even.
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
    """A permutation of 0..size-1 for each key: the Simon block cipher, walked until it lands inside (kernel's source).

    index int64 [n]; keys uint64 [n, 2].
    """
    keys = tf.reshape(tf.bitcast(keys, tf.int32), [-1, 4])[:, :3]
    largest = size - 1
    # The kernel takes ceil(log2(largest)) bits, made even and at least 16: one too few for an index that is itself an
    # even power of two, for example with 65,537 samples, where one sample would come twice and one never. There,
    # 0..size is permuted and its additional element is stepped over.
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
    """The start of the random numbers of a use. In Python: it is the same for all positions."""
    return _u64(_finalised(_finalised(seed % 2**64) ^ use))


def _hash(start: tf.Tensor, counter: tf.Tensor) -> tf.Tensor:
    """SplitMix64's counter-th output from `start`; both broadcast. start uint64, counter int64 -> uint64."""
    return _finalise(start + (tf.bitcast(counter, tf.uint64) + _u64(1)) * _u64(_GOLDEN))


def _finalise(z: tf.Tensor) -> tf.Tensor:
    """SplitMix64's finaliser, a bijection on uint64 in which every input bit reaches every output bit."""
    shift = tf.bitwise.right_shift
    z = (z ^ shift(z, _u64(30))) * _u64(0xBF58476D1CE4E5B9)
    z = (z ^ shift(z, _u64(27))) * _u64(0x94D049BB133111EB)
    return z ^ shift(z, _u64(31))


def _finalised(z: int) -> int:
    """The finaliser in Python, for a number from 0 to 2**64 - 1."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31
