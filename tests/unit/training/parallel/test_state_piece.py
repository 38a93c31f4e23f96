"""A variable without elements that is shared out: part of a snapshot as any other."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import tensorflow as tf

from tfdist.artifacts.parts import save_part
from tfdist.training.parallel.sharded_state import ShardedState
from tfdist.training.parallel.state_piece import Piece


def of_nothing(rank):
    """What one of two workers holds of a variable [0, 4]."""
    return Piece(
        tf.Variable(np.zeros(0, np.float32)), (0, 4), SimpleNamespace(size=2, index=rank, ranks=(0, 1)), None, True
    )


def test_the_first_writes_it_whole_and_all_read_nothing(tmp_path):
    first, second = (of_nothing(rank).to_shards("model/0000") for rank in range(2))
    assert [(shard.shape, shard.spec, shard.array.shape) for shard in first] == [((0, 4), "", (0, 4))] and second == []
    save_part(f"{tmp_path}/part", first, ["model/0000"])
    assert [of_nothing(rank).read(f"{tmp_path}/part", "model/0000").shape for rank in range(2)] == [(0,), (0,)]


def test_it_is_whole_without_a_collective():
    """TensorFlow's would divide by 0, which ends the process."""
    state = SimpleNamespace(_gather=lambda *_: 1 / 0)
    assert ShardedState._whole(state, of_nothing(0)).shape == (0, 4)
