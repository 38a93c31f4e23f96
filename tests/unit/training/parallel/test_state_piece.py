"""Variables that are divided over workers: without elements, and of every type."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tfdist.artifacts.sharded_snapshots import save_part
from tfdist.artifacts.snapshot_folder import SnapshotFolder
from tfdist.control.exit_codes import ConfigError
from tfdist.training.parallel.sharded_state import ShardedState
from tfdist.training.parallel.state_piece import Piece


def of_nothing(rank):
    """What one of two workers holds of a variable [0, 4]."""
    return Piece(
        tf.Variable(np.zeros(0, np.float32)), (0, 4), SimpleNamespace(size=2, index=rank, ranks=(0, 1)), None, True
    )


def test_the_first_writes_it_whole_and_all_read_nothing(tmp_path):
    first, second = (of_nothing(rank).to_shards("model/0000") for rank in range(2))
    assert [(shard.shape, shard.entry.box, shard.array.shape) for shard in first] == [
        ((0, 4), None, (0, 4))
    ] and second == []
    save_part(f"{tmp_path}/part", first, ["model/0000"], direct=True)
    assert [of_nothing(rank).read(f"{tmp_path}/part", "model/0000").shape for rank in range(2)] == [(0,), (0,)]


def test_a_variable_of_no_fixed_shape_is_refused():
    update = SimpleNamespace(owners={}, stages={})
    state = SimpleNamespace(update=update, _replicas=SimpleNamespace(size=2), _number={})
    memory = tf.Variable([[1.0]], shape=tf.TensorShape([None, 1]), name="memory")
    with pytest.raises(ConfigError, match=r"memory:0 has no fixed shape, and a mesh \(--mesh, --zero\)"):
        ShardedState._piece(state, "model/0000", memory, {})


def test_it_is_whole_without_a_collective():
    """TensorFlow's would divide by 0, which ends the process."""
    state = SimpleNamespace(_gather=lambda *_: 1 / 0)
    assert ShardedState._whole(state, of_nothing(0)).shape == (0, 4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int16", "uint16", "uint32", "uint64", "bool"])
def test_what_two_wrote_three_read_and_one(dtype, tmp_path):
    """Also of types of which TensorFlow reads no other boxes than were saved."""
    whole = np.arange(35).reshape(5, 7).astype(tf.as_dtype(dtype).as_numpy_dtype)

    def piece(rank, size):
        length = -(-whole.size // size)
        own = np.pad(whole.reshape(-1), (0, length * size - whole.size))[rank * length : (rank + 1) * length]
        return Piece(tf.Variable(own, name="w"), (5, 7), SimpleNamespace(size=size, index=rank), None, True)

    prefixes = [f"{tmp_path}/{rank}" for rank in range(2)]
    for rank, prefix in enumerate(prefixes):
        save_part(prefix, piece(rank, 2).to_shards("a"), ["a"] if not rank else (), direct=True)
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=prefixes, destination_prefix=f"{tmp_path}/state", delete_old_dirs=False
    )
    for size in (1, 2, 3):
        for rank in range(size):
            held = piece(rank, size)
            np.testing.assert_array_equal(held.read(f"{tmp_path}/state", "a"), held.value.numpy())
    store, snapshot = SnapshotFolder(str(tmp_path)), SimpleNamespace(prefix=f"{tmp_path}/state")
    np.testing.assert_array_equal(store.read(snapshot)["a"], whole)
