"""Snapshots that several workers write together: every element once, read back whole or in any other parts."""

import itertools
import json
import math
import threading

import numpy as np
import pytest
import tensorflow as tf

from tfdist.artifacts.sharded_snapshots import Shard, ShardedSnapshotFolder, boxes_of_range, read_shards, runs
from tfdist.artifacts.snapshot_folder import SnapshotFolder

ARRAYS = {
    "model/0000": np.arange(60, dtype=np.float32).reshape(3, 4, 5),
    "model/0001": np.arange(7, dtype=np.float32),
    "train/step": np.array(12, np.int64),
}
FIELDS = {
    "variables": {key: (key, list(array.shape), array.dtype.name) for key, array in ARRAYS.items()},
    "metrics": {},
}


def box(array, where):
    return array[tuple(slice(start, start + length) for start, length in where)]


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (3, 4, 5), (2, 1, 3, 2)])
def test_a_range_of_a_flat_array_is_boxes_in_order(shape):
    array = np.arange(math.prod(shape)).reshape(shape)
    for start, stop in itertools.combinations(range(array.size + 1), 2):
        boxes = boxes_of_range(shape, start, stop)
        np.testing.assert_array_equal(
            np.concatenate([box(array, where).reshape(-1) for where in boxes]), np.arange(start, stop)
        )
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_runs():
    assert runs(np.array([3, 4, 5, 9, 10, 12])) == [(3, 3), (9, 2), (12, 1)] and runs(np.array([], int)) == []


def shards(rank, size):
    """A rank's equal share of every flattened array; the last ranks may have none."""
    found = []
    for key, array in ARRAYS.items():
        length = -(-array.size // size)
        for where in boxes_of_range(array.shape, rank * length, min((rank + 1) * length, array.size)):
            found.append(
                Shard(
                    key,
                    array.shape,
                    where,
                    np.ascontiguousarray(box(array, where)).reshape([length for _, length in where]),
                )
            )
    return found


def write(folder, size, hooks=None, patience=30.0):
    """(stores, what each one's `write` returned or raised)."""
    stores = [
        ShardedSnapshotFolder(str(folder), (hooks or {}).get(rank, lambda step: None), rank, size, "token", patience)
        for rank in range(size)
    ]
    results = [None] * size

    def one(rank):
        try:
            results[rank] = stores[rank].write(12, shards(rank, size), FIELDS)
        except (OSError, TypeError, tf.errors.OpError) as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return stores, results


@pytest.mark.parametrize("size", [1, 3, 8])
def test_written_in_parts_read_as_any(tmp_path, size):
    write(tmp_path, size)
    store = SnapshotFolder(str(tmp_path))
    snapshot = store.verify(12)  # with all checksums
    whole = store.read(snapshot)
    assert whole.keys() == ARRAYS.keys() and all(
        whole[key].tobytes() == array.tobytes() and whole[key].shape == array.shape for key, array in ARRAYS.items()
    )
    assert store.table(snapshot)["model/0000"] == ((3, 4, 5), "float32")
    for rank, key in itertools.product(range(2), ARRAYS):  # two read what `size` wrote
        wanted = [shard for shard in shards(rank, 2) if shard.key == key]
        for shard, found in zip(wanted, read_shards(snapshot.prefix, wanted, ARRAYS[key].dtype), strict=True):
            np.testing.assert_array_equal(found, shard.array)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".writing")]


def test_tensorflows_own_tools_read_it(tmp_path):
    write(tmp_path, 3)
    variable = tf.Variable(np.zeros((3, 4, 5), np.float32))
    group = tf.train.Checkpoint(**{"0000": variable})
    read = tf.train.Checkpoint(model=group).restore(tf.train.latest_checkpoint(str(tmp_path)))
    read.assert_existing_objects_matched().expect_partial()
    np.testing.assert_array_equal(variable, ARRAYS["model/0000"])


def test_a_part_that_fails_or_does_not_come_leaves_no_snapshot(tmp_path):
    def full(step):
        raise OSError("No space left on device")

    def other(step):
        raise TypeError("No space left on device, in a way that nobody thought of")

    cases = {"full": ({2: full}, 30.0), "other": ({2: other}, 30.0), "late": ({}, 0.2)}
    for name, (hooks, patience) in cases.items():
        if name == "late":
            late = ShardedSnapshotFolder(str(tmp_path / name), lambda step: None, 0, 2, "token", patience)
            with pytest.raises(OSError, match="the shards of ranks 1 did not arrive"):
                late.write(12, shards(0, 2), FIELDS)
        else:
            _, results = write(tmp_path / name, 3, hooks, patience)
            assert "rank 2: No space left" in str(results[0])
        assert SnapshotFolder(str(tmp_path / name)).steps() == []


def test_what_a_slow_worker_leaves_of_a_failed_snapshot_goes_with_the_next(tmp_path):
    """It makes the folder anew that the chief has removed."""
    chief, slow = (ShardedSnapshotFolder(str(tmp_path), lambda step: None, rank, 2, "token", 0.1) for rank in range(2))
    with pytest.raises(OSError, match="did not arrive"):
        chief.write(11, shards(0, 2), FIELDS)
    slow.write(11, shards(1, 2), FIELDS)
    assert [path.name for path in tmp_path.iterdir()] == [".writing-step-00000011-token-1"]
    write(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "step-00000012"]


def test_a_late_part_of_the_first_write_of_a_step_is_none_of_the_second(tmp_path):
    """As after bad numbers, which lead back to before a snapshot that failed."""
    chief, slow = (ShardedSnapshotFolder(str(tmp_path), lambda step: None, rank, 2, "token", 0.1) for rank in range(2))
    with pytest.raises(OSError, match="did not arrive"):
        chief.write(12, shards(0, 2), FIELDS)
    slow.write(12, shards(1, 2), FIELDS)
    with pytest.raises(OSError, match="did not arrive"):
        chief.write(12, shards(0, 2), FIELDS)
    assert chief.steps() == []


def test_a_part_that_was_changed_is_noticed(tmp_path):
    write(tmp_path, 3)
    path = tmp_path / "step-00000012"
    victim = next(
        name
        for name, entry in json.loads((path / "manifest.json").read_text())["files"].items()
        if "data" in name and entry["bytes"]
    )
    content = bytearray((path / victim).read_bytes())
    content[0] ^= 1
    (path / victim).write_bytes(content)
    snapshot, reasons = SnapshotFolder(str(tmp_path)).newest_valid()
    assert snapshot is None and victim in reasons[0]
