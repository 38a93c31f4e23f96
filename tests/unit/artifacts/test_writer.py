"""The background writer, the retention and the save policy."""

import math
import os
import shutil
import threading

import numpy as np
import pytest
import tensorflow as tf

from tfdist.artifacts.policy import Retention, TimePolicy
from tfdist.artifacts.snapshot_folder import SnapshotFolder
from tfdist.artifacts.writer import SnapshotWriter

ARRAYS = {"model/0000": np.ones(1000, "float32")}


def writer(tmp_path, keep=100, **options):
    return SnapshotWriter(SnapshotFolder(tmp_path / "checkpoints"), Retention(keep, **options), retry_after=0.01)


@pytest.mark.slow
def test_saves_wait_for_the_previous_one(tmp_path):
    made = writer(tmp_path)
    gate, order = threading.Event(), []
    original = made.store.write

    def slow(step, *rest):
        gate.wait(10)
        order.append(step)
        return original(step, *rest)

    made.store.write = slow
    made.save(1, ARRAYS, {})
    assert order == []  # the caller did not wait
    threading.Timer(1.0, gate.set).start()  # long, as this thread may be kept from its core before it waits
    made.save(2, ARRAYS, {})
    assert order[:1] == [1] and made.stats.wait_s > 0.1
    made.wait()
    assert made.store.steps() == [1, 2]
    assert [kind for kind, _ in made.messages()] == ["save", "save"] and made.messages() == []


def test_arrays_are_given_back_when_they_have_been_written(tmp_path):
    made, gate = writer(tmp_path), threading.Event()
    original = made.store.write
    made.store.write = lambda *given: gate.wait(10) and original(*given)
    made.save(1, ARRAYS, {})
    assert made.recycled() is None  # still being written
    gate.set()
    made.wait()
    assert made.recycled() is ARRAYS and made.recycled() is None


def test_failures_are_counted_told_and_survived(tmp_path):
    made = writer(tmp_path)
    made.save(1, ARRAYS, {})
    made.wait()
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("a file in the way")
    for step in (2, 3):
        made.save(step, ARRAYS, {})
        made.wait()
    warnings = [values["message"] for kind, values in made.messages() if kind == "warning"]
    assert (
        len(warnings) == 2
        and "failure number 2" in warnings[1]
        and made.stats.failures == 2
        and "step 3" in made.last_failure
    )
    (tmp_path / "checkpoints").unlink()
    made.save(4, ARRAYS, {})
    made.wait()
    assert made.last_failure == "" and made.store.newest_valid()[0].step == 4


def test_a_failure_of_any_kind_is_told(tmp_path, capsys):
    made = writer(tmp_path)
    made.save(1, {"model/0000": np.array(["2026-11-25"], "M8[s]")}, {})
    made.wait()
    assert made.stats.failures == 1 and "TypeError" in made.messages()[0][1]["message"]
    assert "Traceback" not in capsys.readouterr().err and made.store.steps() == []


def test_a_snapshot_that_is_committed_counts_though_its_pointer_cannot_be_written(tmp_path, monkeypatch):
    made = writer(tmp_path, keep=1)
    made.save(1, ARRAYS, {})
    made.wait()
    text = SnapshotFolder._write_text

    def full(store, path, content):
        if "checkpoint-" in path:
            open(path, "w").close()
            raise OSError("No space left on device")
        text(store, path, content)

    monkeypatch.setattr(SnapshotFolder, "_write_text", full)
    made.save(2, ARRAYS, {})
    made.wait()
    kinds = [kind for kind, _ in made.messages()]
    assert kinds == ["save", "save", "warning"] and made.stats.failures == 0
    assert sorted(os.listdir(made.store.directory)) == ["checkpoint", "step-00000002"]
    monkeypatch.undo()
    made.save(3, ARRAYS, {})
    made.wait()
    assert [kind for kind, _ in made.messages()] == ["save"]
    assert tf.train.latest_checkpoint(made.store.directory).endswith("step-00000003/state-3")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_harms_nothing(tmp_path):
    disk = tmp_path / "checkpoints"
    disk.mkdir()
    assert os.system(f"mount -t tmpfs -o size=3m tmpfs {disk}") == 0
    try:
        made = writer(tmp_path, keep=1)
        big = {"model/0000": np.random.default_rng(0).normal(size=450_000).astype("float32")}  # 1.8 MB: two do not fit
        made.save(1, big, {})
        made.wait()
        made.save(2, big, {})
        made.wait()
        assert (
            made.stats.failures == 1
            and "SNAPSHOT NOT WRITTEN"
            in [values for kind, values in made.messages() if kind == "warning"][0]["message"]
        )
        assert made.store.newest_valid()[0].step == 1  # never deleted to make room
    finally:
        os.system(f"umount {disk}")


def test_retention_deletes_only_after_the_new_one_is_there(tmp_path):
    made = writer(tmp_path, keep=2, every=10)
    for step in range(8, 14):
        made.save(step, ARRAYS, {})
    made.wait()
    assert made.store.steps() == [10, 12, 13]


@pytest.mark.parametrize(
    "options, steps, metrics, kept",
    [
        ({"keep": 1}, [1, 2, 3], {}, [3]),
        ({"keep": 2}, [3, 1, 2], {}, [2, 3]),
        ({"keep": 5}, [1, 2], {}, [1, 2]),
        ({"keep": 1, "every": 2}, [1, 2, 3, 4, 5], {}, [2, 4, 5]),
        ({"keep": 1, "best": "min:loss"}, [1, 2, 3], {1: {"loss": 0.5}, 2: {"loss": 0.1}}, [2, 3]),
        (
            {"keep": 1, "best": "max:accuracy"},
            [1, 2, 3],
            {1: {"accuracy": 0.9}, 2: {"accuracy": 0.1}, 3: {"accuracy": 0.3}},
            [1, 3],
        ),
        ({"keep": 1, "best": "max:accuracy"}, [1, 2, 3], {1: {"loss": 0.9}}, [3]),
        ({"keep": 1, "best": "min:loss"}, [1, 2, 3], {1: {"loss": math.nan}, 2: {"loss": 0.5}, 3: {"loss": 2}}, [2, 3]),
        ({"keep": 1, "best": "max:f1"}, [1, 2, 3], {1: {"f1": math.nan}, 2: {"f1": 0.5}, 3: {"f1": 0.1}}, [2, 3]),
        ({"keep": 1, "best": "min:loss"}, [1, 2, 3], {1: {"loss": 0.5}, 2: {"loss": 0.5}}, [1, 3]),
    ],
)
def test_retention(options, steps, metrics, kept):
    doomed = Retention(**options).to_delete(steps, metrics)
    assert sorted(set(steps) - set(doomed)) == kept


def test_time_policy():
    now = [0.0]
    policy = TimePolicy(15, lambda: now[0])
    now[0] = 899
    assert not policy.due()
    now[0] = 900
    assert policy.due()
    policy.saved()
    assert not policy.due()
    now[0] = 1e9
    assert not TimePolicy(0, lambda: now[0]).due()
