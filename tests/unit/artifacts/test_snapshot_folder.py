"""Snapshots: committed whole or not at all, and never trusted when damaged."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.e2e.job import ENVIRONMENT
from tfdist.artifacts.manifest import CRC, MANIFEST, SHA
from tfdist.artifacts.snapshot_folder import FolderOptions, SnapshotFolder
from tfdist.control.exit_codes import CheckpointError

ARRAYS = {
    "model/0000": np.arange(12, dtype="float32").reshape(3, 4) / 7,
    "model/0001": np.array([1, -2], "int64"),
    "optimizer/0000": np.array(-0.0, "float32"),
    "optimizer/0001": np.array([1.5, 3e38], ml_dtypes.bfloat16),
    "train/step": np.array(10, "int64"),
}


@pytest.fixture
def store(tmp_path):
    return SnapshotFolder(tmp_path / "checkpoints")


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "removed":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(content[:-1])
    else:
        path.write_bytes(
            content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 1]) + content[len(content) // 2 + 1 :]
        )


def test_round_trip_is_bitwise(store):
    store.write(10, ARRAYS, {"consumed": 640})
    snapshot = store.verify(10)
    assert (snapshot.manifest["step"], snapshot.manifest["consumed"]) == (10, 640)
    read = store.read(snapshot)
    assert read.keys() == ARRAYS.keys()
    for key, array in ARRAYS.items():
        assert read[key].dtype == array.dtype and read[key].tobytes() == array.tobytes(), key


def test_everything_is_on_the_disk_before_the_name_that_makes_it_believed(store, monkeypatch):
    """A machine that loses power keeps what was flushed, and may keep a rename without what it renames."""
    happened = []
    fsync, rename = os.fsync, os.rename

    def flushed(descriptor):
        happened.append(("flushed", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def renamed(old, new):
        happened.append(("renamed", str(new)))
        files = {f"{old}/{name}" for name in os.listdir(old)}
        late = files - {path for what, path in happened if what == "flushed"}
        assert not late, f"{sorted(late)} may be lost though {new} is there"
        assert happened[-2] == ("flushed", str(old)), "the folder's own list of names"
        rename(old, new)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "rename", renamed)
    store.write(10, ARRAYS, {})
    commit = happened.index(("renamed", store.path(10)))
    assert happened[commit + 1] == ("flushed", str(store.directory))


def test_tensorflow_reads_it_with_its_own_tools(store):
    store.write(10, ARRAYS, {})
    store.write(20, ARRAYS, {})
    latest = tf.train.latest_checkpoint(store.directory)
    assert latest == f"{store.directory}/step-00000020/state-20"
    np.testing.assert_array_equal(
        tf.train.load_checkpoint(latest).get_tensor("model/0000/.ATTRIBUTES/VARIABLE_VALUE"), ARRAYS["model/0000"]
    )


def test_a_checkpoint_manager_restores_it_into_variables(store):
    """Each variable under its key, the ones that NumPy and TensorFlow share no memory of, too."""
    store.write(10, ARRAYS, {})
    groups = {}
    for key, array in ARRAYS.items():
        group, _, name = key.partition("/")
        groups.setdefault(group, {})[name] = tf.Variable(tf.zeros(array.shape, array.dtype.name))
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(**groups), store.path(10), 1, checkpoint_name="state")
    assert manager.latest_checkpoint == f"{store.path(10)}/state-10"
    tf.train.Checkpoint(**groups).restore(manager.latest_checkpoint).assert_consumed()
    for key, array in ARRAYS.items():
        group, _, name = key.partition("/")
        np.testing.assert_array_equal(groups[group][name].numpy(), array)


def test_arrays_of_every_kind_are_written_as_they_are(store):
    arrays = {
        "a/strided": np.arange(24, dtype="float32").reshape(4, 6)[::2, ::3],
        "a/turned": np.arange(6, dtype="float64").reshape(2, 3).T,
        "a/empty": np.zeros((0, 3), "float32"),
        "a/bool": np.array([True, False]),
        "a/half": np.array([1.5, 65504], "float16"),
        "a/complex": np.array([1 + 2j], "complex64"),
        "a/text": np.array([b"one", b"two"], object),
        "a/word": np.array(b"one\0", object),
        "a/number": np.array(5),
        "a/unaligned": np.frombuffer(b"x" + np.arange(5, dtype="int32").tobytes(), np.uint8)[1:].view("int32"),
    }
    store.write(1, arrays, {})
    read = store.read(store.verify(1))
    for key, array in arrays.items():
        assert read[key].dtype == array.dtype and read[key].shape == array.shape, key
        np.testing.assert_array_equal(read[key], array)


@pytest.mark.parametrize("checksum", [CRC, SHA])
@pytest.mark.parametrize("how", ["removed", "truncated", "flipped"])
def test_every_damaged_file_is_found_and_the_previous_snapshot_used(store, how, checksum):
    store = SnapshotFolder(store.directory, options=FolderOptions(checksum=checksum))
    store.write(10, ARRAYS, {})
    names = sorted(os.listdir(store.path(10)))
    assert len(names) >= 4 and MANIFEST in names
    for name in (name.replace("state-10", "state-20") for name in names):
        store.write(20, ARRAYS, {})
        damage(Path(store.path(20)) / name, how)
        snapshot, passed_over = store.newest_valid()
        assert snapshot.step == 10 and len(passed_over) == 1 and name in passed_over[0], (name, passed_over)
        store.delete(20)


def test_damaged_ones_do_not_count_as_kept(store, tmp_path):
    """Else retention would keep a damaged newer one and delete the valid one."""
    store.write(1, ARRAYS, {})
    store.write(9, ARRAYS, {})
    (tmp_path / "checkpoints" / "step-00000009" / "manifest.json").unlink()
    assert store.newest_valid()[0].step == 1
    store.set_aside_damaged()
    assert store.steps() == [1] and len(list((tmp_path / "checkpoints").glob("damaged-step-00000009-*"))) == 1
    store.write(9, ARRAYS, {})
    assert store.newest_valid() == (store.verify(9), [])


def test_without_a_valid_one_there_is_none(store):
    assert store.newest_valid() == (None, [])
    store.write(10, ARRAYS, {})
    damage(Path(store.path(10)) / MANIFEST, "removed")
    snapshot, passed_over = store.newest_valid()
    assert snapshot is None and "never completed" in passed_over[0]
    with pytest.raises(CheckpointError, match=MANIFEST):
        store.verify(10)


def test_a_failed_write_leaves_nothing_and_touches_nothing(store, monkeypatch):
    store.write(10, ARRAYS, {})
    with pytest.raises((OSError, tf.errors.OpError)):
        monkeypatch.setattr("os.rename", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
        store.write(20, ARRAYS, {})
    assert os.listdir(store.directory).count("step-00000010") == 1 and store.steps() == [10]
    assert not [name for name in os.listdir(store.directory) if name.startswith(".writing")]
    assert store.newest_valid()[0].step == 10


def test_leftovers_of_killed_writers_are_removed(store):
    store.write(10, ARRAYS, {})
    (Path(store.directory) / ".writing-step-00000020-abc").mkdir()
    (Path(store.directory) / ".deleting-step-00000005-abc").mkdir()
    store.clean()
    assert sorted(os.listdir(store.directory)) == ["checkpoint", "step-00000010"]


@pytest.mark.parametrize("killed_at", ["the new one has its name", "the old one is removed"])
def test_killed_while_a_step_is_written_again_there_is_one_of_it(store, monkeypatch, killed_at):
    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    rename, renames = os.rename, []
    store.write(10, ARRAYS, {})
    if killed_at == "the old one is removed":
        monkeypatch.setattr("tfdist.artifacts.snapshot_folder.remove_tree", killed)
    else:
        monkeypatch.setattr("os.rename", lambda *names: killed() if renames else renames.append(rename(*names)))
        monkeypatch.setattr("tfdist.artifacts.snapshot_folder.remove_tree", lambda path: None)
    with pytest.raises(Killed):
        store.write(10, ARRAYS, {})
    monkeypatch.undo()
    again = SnapshotFolder(store.directory)
    again.clean()
    assert again.newest_valid()[0].step == 10
    assert sorted(os.listdir(store.directory)) == ["checkpoint", "step-00000010"]


def test_a_step_written_again_counts_though_the_old_one_cannot_be_removed(store, monkeypatch):
    store.write(10, ARRAYS, {})
    remove = "tfdist.artifacts.snapshot_folder.remove_tree"
    monkeypatch.setattr(remove, lambda path: (_ for _ in ()).throw(OSError("busy")))
    assert store.write(10, ARRAYS, {"consumed": 7}) > 0
    monkeypatch.undo()
    store.clean()
    assert store.newest_valid()[0].manifest["consumed"] == 7
    assert sorted(os.listdir(store.directory)) == ["checkpoint", "step-00000010"]


def test_a_pipe_is_not_waited_for(store):
    store.write(10, ARRAYS, {})
    manifest = Path(store.path(10)) / MANIFEST
    manifest.unlink()
    os.mkfifo(manifest)
    with pytest.raises(CheckpointError, match="is not a file"):
        store.verify(10)


def test_links_that_stand_for_snapshots_and_leftovers_lead_nowhere(store, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("kept")
    store.write(10, ARRAYS, {})
    folder = Path(store.directory)
    for name in (".writing-step-00000001-x", ".deleting-y", "step-00000001"):
        (folder / name).symlink_to(elsewhere)
    (folder / ".writing-checkpoint-z").write_text("a file")
    store.clean()
    store.delete(1)
    assert (elsewhere / "mine").read_text() == "kept" and sorted(store.steps()) == [10]
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint", "step-00000010"]


KILLED = """
import sys, numpy as np
from tfdist.artifacts.snapshot_folder import SnapshotFolder
store = SnapshotFolder(sys.argv[1])
for step in range(1, 1000):
    store.write(step, {"model/0000": np.full(2_000_000, step, "float32")}, {})
    print(step, flush=True)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start")
def test_a_writer_killed_at_any_moment_leaves_a_valid_snapshot(tmp_path):
    script = tmp_path / "writer.py"
    script.write_text(KILLED)
    for round_, delay in enumerate((0.02, 0.035, 0.05)):
        store = SnapshotFolder(tmp_path / str(round_))
        writer = subprocess.Popen(
            [sys.executable, str(script), store.directory],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=ENVIRONMENT,
            text=True,
        )
        for _ in range(3):
            done = int(writer.stdout.readline())
        time.sleep(delay)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        snapshot, _ = store.newest_valid()
        assert snapshot.step >= done
        assert (store.read(snapshot)["model/0000"] == snapshot.step).all()
