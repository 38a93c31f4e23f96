"""Parts of the runtime of plain processes over TensorFlow's collectives: types on the wire, lengths, the watch."""

import threading
import types

import numpy as np
import pytest
import tensorflow as tf

from tfdist.runtime.peer_watch import PeerWatch
from tfdist.runtime.row_exchange import RowExchange, _rounded_up
from tfdist.runtime.tensorflow_peers import TensorflowPeers
from tfdist.runtime.wire_types import of_one_type, off_wire, on_wire

WIDTHS = {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64), "complex": (64, 128)}
TYPES = ["bool", "bfloat16", *(f"{kind}{bits}" for kind, widths in WIDTHS.items() for bits in widths)]


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_comes_back_bit_for_bit(dtype):
    values = tf.cast(tf.constant([[0, 1, 2], [3, 0, 1]]), dtype)
    wire = on_wire(values)
    assert wire.dtype in (tf.float16, tf.float32, tf.float64) and wire.shape[:2] == [2, 3]
    assert on_wire(wire) is wire or on_wire(wire).dtype == wire.dtype
    back = off_wire(wire, values.dtype)
    assert back.dtype == values.dtype and back.numpy().tobytes() == values.numpy().tobytes()


def test_bits_of_nan_and_of_minus_zero_stay():
    bits = np.array([[0x7FC00001, 0x80000000], [0xFF800001, 0x7FF00001]], np.uint32)
    found = off_wire(on_wire(tf.constant(bits.view(np.float32))), tf.float32)
    assert found.numpy().view(np.uint32).tolist() == bits.tolist()
    found = off_wire(on_wire(tf.constant(bits.view(np.int64))), tf.int64)
    assert found.numpy().view(np.uint32).tolist() == bits.tolist()


def test_tensors_of_one_width_travel_together():
    wire = [on_wire(tf.zeros([1], dtype)) for dtype in ("float32", "int64", "int32", "bool", "float64", "bfloat16")]
    assert of_one_type(wire) == [[0, 2, 3], [1, 4], [5]]


def test_lengths_are_rounded_up_by_an_eighth_at_most():
    for length in [0, 1, 7, 16, 17, 100, 1000, 12345]:
        assert length <= _rounded_up(length) <= length * 9 / 8 + 1
    assert len({_rounded_up(length) for length in range(100_000)}) < 150


class _Others:
    """A control ring to workers that have as many rows as this one, and `more`."""

    def __init__(self):
        self.more = 0

    def gather_batches(self, arrays, stamp=0, same=()):
        sizes = arrays[0].copy()
        sizes[0] += self.more
        return [memoryview(each.tobytes()) for each in (arrays[0], sizes)]


class _Group:
    size = 2


def test_each_length_has_a_number_of_its_own():
    others = _Others()
    exchange = RowExchange(others, _Group())

    def meet(site, rows, width=4):
        *counts, longest, number = exchange._meet((site,), lambda: 0, np.array([[rows], [width]], np.int64))
        return counts, longest, number

    assert meet(0, 5) == ([5, 5], 5, 1)
    assert meet(0, 6)[2] == 4 and meet(0, 5)[2] == 1  # three collectives have a number each
    assert meet(1, 5)[2] == 7 and meet(0, 5, width=2)[2] == 10
    others.more = 1
    assert meet(0, 5) == ([5, 6], 6, 4)
    for rows in range(100, 106):
        meet(0, rows)
    counts, longest, _ = meet(0, 1000)  # too many lengths by now
    assert counts == [1000, 1001] and longest == 1024
    assert meet(0, 1005)[1:] == meet(0, 1000)[1:]
    numbers = {meet(0, rows)[2] for rows in range(2000)}
    assert len(numbers) < 100


def test_the_watch_ends_what_waits_for_a_lost_peer_and_nothing_else():
    said, waits, asked = [], threading.Event(), threading.Event()

    def lost():
        asked.set()
        return "gone"

    ended = threading.Event()
    watch = PeerWatch(lost, waits.is_set, lambda sentence: (said.append(sentence), ended.set()))
    assert asked.wait(60) and not said
    waits.set()
    assert ended.wait(60) and said == ["gone"]
    watch.stop()


def test_an_exchange_outside_of_a_graph_needs_no_gradient_of_its_own():
    """A tape that sees a function asks for the gradients of all operations in it, used or not."""
    peers = types.SimpleNamespace(_functions={})
    x = tf.constant([1.0, 2.0])

    def exchanged(tensors):
        return [tf.bitcast(tf.bitcast(tf.convert_to_tensor(tensor), tf.float16), tf.float32) for tensor in tensors]

    with tf.GradientTape() as tape:
        tape.watch(x)
        slices = tf.IndexedSlices(x, tf.constant([1, 0]), tf.constant([2]))
        found = TensorflowPeers._here(peers, exchanged)([x, slices])
    np.testing.assert_array_equal(found, [[1.0, 2.0], [2.0, 1.0]])
