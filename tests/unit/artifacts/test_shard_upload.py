"""Snapshots in a store whose parts come from workers with a folder each: made, read in pieces, never of two writes."""

from __future__ import annotations

import itertools
import json
import random
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.stores.faulty_proxy import FAULTS
from tests.stores.s3_server import BUCKET
from tests.stores.webhdfs_server import webhdfs_server
from tests.unit.artifacts.test_sharded_snapshots import box
from tfdist.artifacts import partial_download
from tfdist.artifacts.partial_download import PartialDownload
from tfdist.artifacts.policy import Retention
from tfdist.artifacts.read_snapshots import bring_for_reading
from tfdist.artifacts.remote_snapshots import RemoteSnapshots
from tfdist.artifacts.shard_upload import PARTS, ShardUpload, is_note, left_parts, send_part
from tfdist.artifacts.sharded_commit import ShardedCommit
from tfdist.artifacts.sharded_snapshots import Shard, boxes_of_range, read_shards
from tfdist.artifacts.snapshot_folder import SnapshotFolder
from tfdist.artifacts.stored_manifest import step_folder
from tfdist.artifacts.upload_thread import UploadThread, sent_within
from tfdist.control.exit_codes import CheckpointError
from tfdist.control.run_address import SNAPSHOTS
from tfdist.storage import object_store
from tfdist.storage.object_store import ObjectStore
from tfdist.storage.store_errors import StoreError

URL = f"s3://{BUCKET}/runs/one"
SHAPES = {"model/0000": (3, 4, 5), "model/0001": (7,), "optimizer/0000": (300, 40), "train/step": ()}


def arrays(step: int) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(step)
    return {key: chance.normal(size=shape).astype(np.float32) for key, shape in SHAPES.items()}


def shards(rank: int, size: int, whole: dict[str, np.ndarray]) -> list[Shard]:
    """A rank's equal share of every flattened array; the last have nothing of the small ones, or nothing at all."""
    found = []
    for key, array in whole.items():
        length = -(-array.size // size)
        for where in boxes_of_range(array.shape, rank * length, min((rank + 1) * length, array.size)):
            content = np.ascontiguousarray(box(array, where)).reshape([length for _, length in where])
            found.append(Shard(key, array.shape, where, content))
    return found


def fields(metrics: dict | None = None) -> dict:
    return {
        "variables": {key: (key, list(shape), "float32") for key, shape in SHAPES.items()},
        "run_id": "abc",
        "metrics": metrics or {},
    }


class Workers:
    """Of one attempt, each on a machine of its own. Senders run when the test says so."""

    def __init__(self, tmp_path: Path, size: int, token: str = "first", machines: str = "machine", url: str = URL):
        self.folders = [tmp_path / f"{machines}-{rank}" for rank in range(size)]
        self.objects = [ObjectStore(url, patience=20.0) for _ in range(size)]
        self.parts = [
            ShardUpload(
                self.objects[rank], self.folders[rank], lambda step: None, rank, size, token, allowed=lambda: None
            )
            for rank in range(size)
        ]
        whole = SnapshotFolder(str(self.folders[0] / SNAPSHOTS))
        self.remote = RemoteSnapshots(self.objects[0], whole, Retention(3))
        self.commit = ShardedCommit(self.objects[0], self.parts[0], self.remote)

    def write(self, step: int, content: dict[str, np.ndarray] | None = None) -> None:
        wanted = self.commit.announce(step)
        for rank, each in enumerate(self.parts):
            each.wanted = wanted
            # The fourth has nothing to write, as a replica may not have.
            each.write(step, shards(rank, min(len(self.parts), 3), content or arrays(step)), fields())

    def send(self, *steps: int, ranks=None) -> None:
        for step, rank in itertools.product(steps, range(len(self.parts)) if ranks is None else ranks):
            self.parts[rank].send(step)

    def save(self, *steps: int) -> None:
        for step in steps:
            self.write(step)
            self.send(step)
            self.commit._make_first()
        assert self.commit.steps() == []

    def read(self, rank: int, size: int, folder: Path) -> tuple[int, int]:
        """A worker of `size` reads its part on the machine `folder`. Returns the step and the bytes that came."""
        chief = PartialDownload(self.objects[0], folder.parent / "chief", self.remote)
        snapshot, passed_over = chief.newest_valid()
        assert snapshot and not passed_over, passed_over
        objects = self.objects[rank % len(self.objects)]
        store = PartialDownload(objects, folder, remote=None)
        mine = partial_download.Snapshot(store.path(snapshot.step), snapshot.step, snapshot.manifest)
        wanted = shards(rank, size, arrays(snapshot.step))
        with mock.patch.object(objects, "piece", wraps=objects.piece) as brought:
            store.bring(mine, wanted)
        for key in SHAPES:
            own = [shard for shard in wanted if shard.key == key]
            for shard, found in zip(own, read_shards(mine.prefix, own, np.float32), strict=True):
                np.testing.assert_array_equal(found, shard.array)
        return snapshot.step, sum(size for (_, _, size), _ in brought.call_args_list)


def is_right(folder: Path, step: int) -> bool:
    store = SnapshotFolder(str(folder / SNAPSHOTS))
    found = store.read(store.verify(step))
    return found.keys() == arrays(step).keys() and all(np.array_equal(found[key], a) for key, a in arrays(step).items())


@pytest.fixture(params=["s3", "gs", "webhdfs"])
def url(request) -> Iterator[str]:
    if request.param == "webhdfs":
        with webhdfs_server() as server:
            yield server.url
    else:
        request.getfixturevalue({"s3": "s3", "gs": "gcs"}[request.param])
        yield URL.replace("s3", request.param)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 4])
def test_parts_of_machines_of_their_own_become_a_snapshot_like_any_other(url, tmp_path, size):
    workers = Workers(tmp_path, size, url=url)
    workers.save(10, 20)
    assert not any("/part-" in name for name in workers.objects[0].names()), "what it was made of is removed"
    store = SnapshotFolder(str(tmp_path / "reader" / SNAPSHOTS))
    bring_for_reading(workers.objects[0], store)
    assert store.steps() == [20] and is_right(tmp_path / "reader", 20)
    for rank in range(2):
        assert workers.read(rank, 2, tmp_path / f"elsewhere-{rank}")[0] == 20


def test_there_is_no_snapshot_until_the_last_part_has_come(s3, tmp_path):
    workers = Workers(tmp_path, 3)
    workers.write(10)
    for rank in (2, 0):
        workers.send(10, ranks=[rank])
        workers.commit._make_first()
        assert workers.remote.steps() == [] and workers.commit.steps() == [10]
    workers.send(10, ranks=[1])
    data = f"runs/one/{step_folder(10)}/state-10.data-00001-of-00003"
    content = s3.content(data)
    s3.remove(data)
    workers.commit._make_first()
    assert workers.remote.steps() == [], "what it says it has sent must be there"
    s3.change(data, content)
    workers.commit._make_first()
    assert workers.remote.steps() == [10] and workers.commit.steps() == []


def test_a_worker_reads_no_more_than_its_part_and_nothing_that_is_here(s3, tmp_path):
    workers = Workers(tmp_path, 3)
    workers.save(10)
    whole = sum(array.nbytes for array in arrays(10).values())
    index = len(s3.content(f"runs/one/{step_folder(10)}/state-10.index"))
    brought = [workers.read(rank, 2, tmp_path / f"elsewhere-{rank}")[1] for rank in range(2)]
    # Half of each array lies in two of the three parts.
    assert all(0.5 * whole < each < 0.67 * whole + 2 * index for each in brought), (brought, whole)
    assert workers.read(0, 2, tmp_path / "elsewhere-0")[1] == 0, "it has come before"
    assert workers.read(2, 3, workers.folders[2])[1] <= index, "it was written here"


def test_what_is_damaged_is_noticed_and_the_one_before_taken(s3, tmp_path):
    workers = Workers(tmp_path, 2)
    workers.save(10, 20)
    data = f"runs/one/{step_folder(20)}/state-20.data-00001-of-00002"
    content = s3.content(data)
    s3.change(data, content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="state-20.data-00001-of-00002 is damaged: the checksum of bytes"):
        workers.read(1, 2, tmp_path / "elsewhere")
    s3.change(data, content[:-1])
    chief = PartialDownload(workers.objects[0], tmp_path / "chief", workers.remote)
    snapshot, (message,) = chief.newest_valid()
    assert snapshot and snapshot.step == 10 and f"has {len(content) - 1} bytes instead of {len(content)}" in message
    workers.remote.set_aside(20)
    assert workers.read(1, 2, tmp_path / "elsewhere")[0] == 10


def test_a_step_that_is_written_anew_is_of_the_second_writing_alone(s3, tmp_path):
    """Other arrays, as after bad numbers; one worker has sent its first part only."""
    workers = Workers(tmp_path, 2)
    workers.write(10, {key: array + 1 for key, array in arrays(10).items()})
    workers.send(10)
    workers.write(10)
    workers.send(10, ranks=[0])
    workers.commit._make_first()
    assert workers.remote.steps() == []
    workers.send(10, ranks=[1])
    workers.commit._make_first()
    assert workers.read(1, 2, tmp_path / "elsewhere")[0] == 10
    workers.write(10)
    assert workers.remote.steps() == [], "before a file of it is replaced it is believed no longer"


def test_what_a_run_that_has_gone_back_leaves_behind_is_removed_when_the_next_one_is_made(s3, tmp_path):
    """It stayed the newest one: nothing was resumed from the next, which counted as an older one."""
    workers = Workers(tmp_path, 2)
    workers.save(10, 14, 16)
    workers.commit.drop_all()
    workers.write(12)
    assert workers.remote.steps() == [10, 14, 16]
    workers.send(12)
    workers.commit._make_first()
    assert workers.remote.steps() == [10, 12] and workers.read(1, 2, tmp_path / "elsewhere")[0] == 12
    assert b"step-00000012/state-12" in s3.content("runs/one/checkpoints/checkpoint")


def test_whole_snapshots_of_earlier_jobs_on_this_machine_remove_none_of_parts(s3, tmp_path, monkeypatch):
    """They are old, though they are the newest in the chief's folder. Those that the store has removed stay removed."""
    monkeypatch.setattr(UploadThread, "start", lambda self: None)
    first = Workers(tmp_path, 2)
    whole = SnapshotFolder(str(first.folders[0] / SNAPSHOTS))
    for step in (10, 20):
        whole.write(step, arrays(step), fields())
        first.remote._send(step)
    second = Workers(tmp_path, 2, "second", machines="other")
    second.remote._retention = Retention(1)
    second.remote.start()
    second.save(30)
    for every, kept in ((0, []), (20, [20])):
        third = Workers(tmp_path, 2, "third")
        third.remote._retention = Retention(1, every)
        third.remote.start()
        assert third.remote.unsent() == kept
        third.remote._send_newest()
        assert third.remote.steps() == [*kept, 30]


def test_a_whole_snapshot_that_a_run_of_parts_went_on_from_is_sent_and_removes_none(s3, tmp_path):
    workers = Workers(tmp_path, 2)
    SnapshotFolder(str(workers.folders[0] / SNAPSHOTS)).write(10, arrays(10), fields())
    workers.save(20)
    workers.remote._send_newest()
    assert workers.remote.steps() == [10, 20]


def test_a_full_disk_is_not_taken_for_a_damaged_snapshot(tmp_path):
    """The kernel writes what there is room for, and says how much."""
    objects: Any = SimpleNamespace(url=URL, piece=lambda name, start, size: b"x" * size)
    store = PartialDownload(objects, tmp_path, remote=None)
    snapshot = partial_download.Snapshot(str(tmp_path), 10, {})
    (tmp_path / "data").touch()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # without it, only another file system would do
    try:
        with pytest.raises(OSError, match="File too large"):
            store._bring_piece(snapshot, "data", 50_000, 60_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    store._bring_piece(snapshot, "data", 50_000, 60_000)
    assert (tmp_path / "data").read_bytes() == bytes(50_000) + b"x" * 60_000


def test_a_store_slower_than_the_saves_gets_what_was_begun_and_the_newest(s3, tmp_path):
    workers = Workers(tmp_path, 2)
    for step in (10, 20, 30, 40):
        workers.write(step)
    assert workers.commit.steps() == [10, 30, 40]
    assert sorted(workers.parts[1].steps()) == [10, 30, 40] and workers.parts[1].unsent() == [10, 30, 40]
    while workers.commit.steps():
        for each in workers.parts:
            each._send_next()
        workers.commit._make_first()
    assert workers.remote.steps() == [10, 30, 40]
    workers.save(50)
    assert workers.remote.steps() == [30, 40, 50] and workers.parts[0].steps() == [40, 50]


def test_a_part_that_cannot_be_written_is_told_and_the_next_snapshot_made(s3, tmp_path):
    workers = Workers(tmp_path, 3)

    def full(step: int) -> None:
        raise OSError("No space left on device")

    workers.parts[2].before_commit = full
    with pytest.raises(OSError, match="No space"):
        workers.write(10)
    workers.send(10)
    with pytest.raises(StoreError, match="no snapshot of step 10: rank 2: No space left on device"):
        workers.commit._make_first()
    assert workers.commit.steps() == [] and workers.commit.lost() == [10]
    assert sent_within(workers.commit.sender, URL, time.monotonic()) == [10], "a run that ends now lacks it"
    workers.parts[2].before_commit = lambda step: None
    workers.save(20)
    assert workers.commit.lost() == []
    assert not any("step-00000010" in name for name in s3.names()), "what had been sent of it is removed"


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["before the last part", "before the commit"])
def test_what_a_killed_job_has_left_is_sent_and_made_by_the_next(s3, tmp_path, killed):
    first = Workers(tmp_path, 3)
    first.save(10)
    first.write(20)
    first.send(20, ranks=[0, 1] if killed == "before the last part" else None)
    second = Workers(tmp_path, 2, token="second")
    for folder in first.folders:
        for step, rank, note in left_parts(folder, "abc", newest=10):
            send_part(second.objects[0], folder / PARTS / f"step-{step:08d}", step, rank, note)
        assert left_parts(folder, "another run", newest=10) == left_parts(folder, "abc", newest=20) == []
    second.commit.make_left(newer_than=10)
    assert second.read(1, 2, tmp_path / "elsewhere")[0] == 20


def test_messages_that_are_none_are_passed_over(s3, tmp_path):
    """Those of a store, which somebody else may have written, and those of a folder that a crash has damaged."""
    workers = Workers(tmp_path, 2)
    workers.write(10)
    workers.send(10)
    name = f"{step_folder(10)}/part-00000.json"
    good = json.loads(workers.objects[0].text(name))
    for changes in ({"workers": 0}, {"workers": -1}, {"workers": 10**9}, {"workers": True}, {"stamp": 1}, {"data": {}}):
        assert is_note(good, 0) and not is_note({**good, **changes}, 0), changes
        workers.objects[0].put_text(name, json.dumps({**good, **changes}))
        assert workers.commit.make(10) == [0], changes
    workers.objects[0].put_text(name, "[" * 100_000)
    assert workers.commit.make(10) == [0]
    workers.objects[0].put_text(name, json.dumps(good))
    assert workers.commit.make(10) == []
    folder = workers.folders[0]
    assert len(left_parts(folder, "abc", newest=0)) == 1
    for file in (folder / PARTS).glob("*/part-*.json"):
        file.write_text(json.dumps({name: value for name, value in good.items() if name != "workers"}))
    assert left_parts(folder, "abc", newest=0) == []


def test_what_has_lost_a_part_is_removed(s3, tmp_path):
    first = Workers(tmp_path, 3)
    first.save(10)
    first.write(20)
    first.send(20, ranks=[0, 1])
    second = Workers(tmp_path, 2, token="second", machines="new")
    second.commit.make_left(newer_than=10)
    second.remote.start()
    second.remote.sender.end()
    assert not any("step-00000020" in name for name in s3.names()) and second.remote.steps() == [10]


def test_what_a_commit_had_no_time_to_remove_is_removed_by_the_next_start(s3, tmp_path, monkeypatch):
    first = Workers(tmp_path, 2)
    with monkeypatch.context() as killed:
        killed.setattr(first.objects[0], "remove", lambda name: None)
        first.save(10)
    notes = [name for name in s3.names() if "/part-" in name]
    second = Workers(tmp_path, 2, token="second", machines="new")
    second.remote.start()
    second.remote.sender.end()
    assert len(notes) == 4 and not [name for name in s3.names() if "/part-" in name]
    assert second.read(1, 2, tmp_path / "elsewhere")[0] == 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_of_many_faults_none_makes_a_half_snapshot_believed(through_proxy, tmp_path, monkeypatch, seed):
    """Each round saves, sends and reads through faults; some rounds write their step twice."""
    chance = random.Random(seed)
    # Those that are drawn pass, however few tries a busy machine makes in two seconds.
    monkeypatch.setattr(object_store, "_REFUSED_SECONDS", 60.0)

    def draw(method: str, path: str) -> str:
        return chance.choice(FAULTS) if chance.random() < 0.3 else ""

    with through_proxy(draw) as proxy:
        workers, step = Workers(tmp_path, 2), 0
        while sum(proxy.done.values()) < 105:
            step += 10
            if chance.random() < 0.3:
                workers.write(step, {key: array + 1 for key, array in arrays(step).items()})
                workers.send(step, ranks=[chance.randrange(2)])
            workers.write(step)
            while step in workers.commit.steps():  # a listing may be an old one
                for each in workers.parts:
                    each._send_next()
                workers.commit._make_first()
            newest, _ = workers.read(chance.randrange(2), 2, tmp_path / f"elsewhere-{step}")
            assert newest <= step
    manifest = json.loads((ObjectStore(URL).text(f"{step_folder(step)}/manifest.json")) or "{}")
    assert manifest["step"] == step
