"""tfdist/artifacts/remote_snapshots.py against a real server: what is sent, what is believed, what is removed."""

from __future__ import annotations

import errno
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.stores.faulty_proxy import FAULTS
from tests.stores.s3_server import BUCKET
from tests.stores.webhdfs_server import webhdfs_server
from tfdist.artifacts import remote_snapshots, upload_thread
from tfdist.artifacts.policy import Retention
from tfdist.artifacts.read_snapshots import bring_for_reading
from tfdist.artifacts.remote_snapshots import RemoteSnapshots
from tfdist.artifacts.snapshot_folder import SnapshotFolder
from tfdist.control.exit_codes import CheckpointError
from tfdist.storage.object_store import ObjectStore
from tfdist.storage.store_errors import StoreError

URL = f"s3://{BUCKET}/runs/one"
FOLDER = "runs/one/checkpoints"


@pytest.fixture(autouse=True)
def senders_look_often(monkeypatch):
    monkeypatch.setattr(upload_thread, "_LOOK_SECONDS", 0.02)


def arrays(step: int) -> dict[str, np.ndarray]:
    return {"model/kernel": np.random.default_rng(step).normal(size=(40, 30)), "train/step": np.array(step)}


def local(tmp_path, name: str) -> SnapshotFolder:
    return SnapshotFolder(str(tmp_path / name / "checkpoints"))


def sender(
    store: SnapshotFolder, keep: int = 3, patience: float = 20.0, objects: ObjectStore | None = None
) -> RemoteSnapshots:
    return RemoteSnapshots(objects or ObjectStore(URL, patience), store, Retention(keep))


def send(store: SnapshotFolder, *steps: int, keep: int = 3) -> RemoteSnapshots:
    """Writes snapshots, and waits until each has been sent."""
    snapshots = sender(store, keep)
    snapshots.start()
    for step in steps:
        store.write(step, arrays(step), {})
        assert snapshots.sender.finish_soon(30.0) == [], snapshots.sender.trouble()
    snapshots.sender.end()
    return snapshots


def is_right(store: SnapshotFolder, step: int) -> bool:
    found = store.read(store.verify(step))
    return all(np.array_equal(found[key], array) for key, array in arrays(step).items())


def wait_until(true, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_a_snapshot_is_brought_to_another_machine(s3, tmp_path):
    send(local(tmp_path, "here"), 10, 20)
    there = local(tmp_path, "there")
    assert sender(there).bring_newest() == []
    assert there.steps() == [20] and is_right(there, 20)
    sender(there).bring(10)
    assert is_right(there, 10)


def test_a_snapshot_is_brought_from_hdfs(tmp_path):
    with webhdfs_server() as server:
        here, there = local(tmp_path, "here"), local(tmp_path, "there")
        snapshots = RemoteSnapshots(ObjectStore(server.url, 10.0), here, Retention(3))
        snapshots.start()
        here.write(10, arrays(10), {})
        assert snapshots.sender.finish_soon(30.0) == [], snapshots.sender.trouble()
        snapshots.sender.end()
        bring_for_reading(ObjectStore(server.url), there)
        assert is_right(there, 10)


def test_tensorflow_finds_the_newest_in_a_folder_that_was_downloaded(s3, tmp_path):
    send(local(tmp_path, "here"), 10, 20)
    for name in s3.names(FOLDER):
        file = tmp_path / "downloaded" / name.removeprefix(f"{FOLDER}/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(s3.content(name))
    newest = tf.train.latest_checkpoint(str(tmp_path / "downloaded"))
    assert newest and newest.endswith("step-00000020/state-20")
    kernel = tf.train.load_checkpoint(newest).get_tensor("model/kernel/.ATTRIBUTES/VARIABLE_VALUE")
    assert np.array_equal(kernel, arrays(20)["model/kernel"])


def test_nothing_is_brought_that_is_not_newer(s3, tmp_path):
    send(local(tmp_path, "here"), 10)
    there = local(tmp_path, "there")
    there.write(30, arrays(30), {})
    assert sender(there).bring_newest() == []
    assert there.steps() == [30]


@pytest.mark.slow
@pytest.mark.parametrize(
    "harm", ["no manifest", "manifest cut", "data gone", "data changed", "data cut", "data longer"]
)
def test_what_is_not_whole_is_passed_over_and_said(s3, tmp_path, harm):
    send(local(tmp_path, "here"), 10, 20)
    folder = f"{FOLDER}/step-00000020"
    data = f"{folder}/state-20.data-00000-of-00001"
    content = s3.content(data)
    if harm == "no manifest":
        s3.remove(f"{folder}/manifest.json")
    elif harm == "manifest cut":
        s3.change(f"{folder}/manifest.json", s3.content(f"{folder}/manifest.json")[:-40])
    elif harm == "data gone":
        s3.remove(data)
    elif harm == "data changed":
        s3.change(data, bytes([content[0] ^ 1]) + content[1:])
    else:
        s3.change(data, content[:-1] if harm == "data cut" else content + b"more")
    there = local(tmp_path, "there")
    snapshots = sender(there, patience=1.0)
    messages = snapshots.bring_newest()
    assert there.steps() == [10] and is_right(there, 10)
    assert [URL in message for message in messages] == ([] if harm == "no manifest" else [True])
    before = set(s3.names(folder)) - {f"{folder}/manifest.json"}
    snapshots.start()
    snapshots.sender.end()
    assert snapshots.steps() == [10], "it counts no longer as one of those that are kept"
    kept = [f"{folder}/damaged-manifest.json"]
    assert s3.names(folder) == ([] if harm == "no manifest" else sorted([*before, *kept])), "and nothing is removed"
    assert sender(local(tmp_path, "another")).bring_newest() == []


def test_what_killed_senders_left_is_removed(s3, tmp_path):
    store = local(tmp_path, "here")
    send(store, 10)
    s3.change(f"{FOLDER}/step-00000020/state-20.index", b"half")
    left = tmp_path / "here" / ".sending-20-left"
    left.mkdir()
    snapshots = sender(store)
    snapshots.start()
    assert not any("step-00000020" in name for name in s3.names())
    assert not left.exists()
    assert snapshots.unsent() == []


def test_old_ones_are_removed_from_the_store_the_manifest_first(s3, through_proxy, tmp_path):
    removed = []

    def draw(method: str, path: str) -> str:
        if method == "DELETE":
            removed.append(path.rpartition("/")[2])
        return ""

    store = local(tmp_path, "here")
    with through_proxy(draw):
        snapshots = sender(store, keep=2)
        snapshots.start()
        for step in (10, 20, 30):
            store.write(step, arrays(step), {})
            if step == 30:
                store.delete(10)
            assert snapshots.sender.finish_soon(30.0) == []
        wait_until(lambda: snapshots.steps() == [20, 30])
        wait_until(lambda: not any("step-00000010" in name for name in s3.names()))
        snapshots.sender.end()
    assert removed[-4:][0] == "manifest.json", removed


def test_what_an_old_listing_lacks_is_removed_too(s3, tmp_path, monkeypatch):
    snapshots = send(local(tmp_path, "here"), 10)
    monkeypatch.setattr(snapshots._objects, "names", lambda below="": {})
    snapshots.remove(10)
    assert not any("step-00000010" in name for name in s3.names())


def test_the_end_waits_for_what_is_removed_after_the_last_one(s3, through_proxy, tmp_path):
    """A run ends when all is sent: an old one that is there then stays for ever."""
    store = local(tmp_path, "here")
    with through_proxy(lambda method, path: "delay" if method == "DELETE" else "") as proxy:
        proxy.delay_seconds = 0.1
        snapshots = sender(store, keep=1)
        snapshots.start()
        for step in (10, 20):
            store.write(step, arrays(step), {})
            if step == 20:
                store.delete(10)
            assert snapshots.sender.finish_soon(30.0) == []
        snapshots.sender.end()
        assert not any("step-00000010" in name for name in s3.names())


@pytest.mark.slow
def test_a_snapshot_that_is_written_anew_replaces_the_one_there(s3, tmp_path):
    send(local(tmp_path, "here"), 10)
    again = local(tmp_path, "again")
    again.write(10, {key: array * 2 for key, array in arrays(10).items()}, {})
    snapshots = sender(again)
    snapshots._send(10)
    there = local(tmp_path, "there")
    sender(there).bring_newest()
    assert np.array_equal(there.read(there.verify(10))["model/kernel"], 2 * arrays(10)["model/kernel"])


def test_a_step_that_is_saved_again_is_sent_again(s3, tmp_path):
    """As after a rollback, in the same process or in one that starts later."""
    here, there = local(tmp_path, "here"), local(tmp_path, "there")
    snapshots = send(here, 10)
    again = RemoteSnapshots(ObjectStore(URL, 20.0), here, Retention(3))
    again.start()
    assert snapshots.unsent() == again.unsent() == []
    here.write(10, {key: array * 2 for key, array in arrays(10).items()}, {})
    assert snapshots.unsent() == [10]
    assert again.sender.finish_soon(30.0) == [], again.sender.trouble()
    again.sender.end()
    sender(there).bring_newest()
    assert np.array_equal(there.read(there.verify(10))["model/kernel"], 2 * arrays(10)["model/kernel"])


def test_what_a_run_that_has_gone_back_leaves_behind_is_removed_when_the_next_one_is_there(s3, tmp_path):
    """Not before: the store would have no backup for a while. What is kept for ever stays."""
    store = local(tmp_path, "here")
    snapshots = RemoteSnapshots(ObjectStore(URL, 20.0), store, Retention(1, every=8))
    snapshots.start()

    def sent(*steps):
        for step in steps:
            store.write(step, arrays(step), {})
            assert snapshots.sender.finish_soon(30.0) == [], snapshots.sender.trouble()

    sent(5, 8, 9)
    for step in (8, 9):
        store.delete(step)
    assert snapshots.steps() == [5, 8, 9]
    sent(6)
    store.delete(5)
    assert snapshots.steps() == [5, 6, 8]
    assert b"step-00000008/state-8" in s3.content(f"{FOLDER}/checkpoint"), "it named one that is no more"
    sent(7)
    snapshots.sender.end()
    assert snapshots.steps() == [6, 7, 8]


def test_a_store_that_is_away_holds_nothing_up_and_gets_the_rest_later(through_proxy, tmp_path):
    away = [True]
    store = local(tmp_path, "here")
    with through_proxy(lambda method, path: "500" if away[0] else ""):
        away[0] = False
        snapshots = sender(store, patience=0.5)
        snapshots.start()
        away[0] = True
        store.write(10, arrays(10), {})
        store.write(20, arrays(20), {})
        wait_until(lambda: snapshots.sender.trouble() is not None)
        assert URL in str(snapshots.sender.trouble())
        assert snapshots.sender.finish_soon(0.1) == [10, 20]
        away[0] = False
        assert snapshots.sender.finish_soon(30.0) == []
        assert snapshots.sender.trouble() is None
        snapshots.sender.end()
    assert sender(local(tmp_path, "there")).steps() == [10, 20]


def test_the_manifest_is_sent_last(through_proxy, tmp_path):
    written: list[str] = []

    def draw(method: str, path: str) -> str:
        if method in ("PUT", "POST") and "/step-" in path:
            written.append(path.partition("?")[0].rpartition("/")[2])
        return ""

    store = local(tmp_path, "here")
    store.write(10, arrays(10), {})
    with through_proxy(draw):
        sender(store)._send(10)
    assert written.index("manifest.json") == len(written) - 1 > 1, written


def test_who_has_lost_the_place_while_it_sends_does_not_let_its_snapshot_count(s3, tmp_path):
    store, asked = local(tmp_path, "here"), []

    def allowed():
        asked.append(True)
        if len(asked) > 1:
            raise StoreError("another job writes there")

    snapshots = RemoteSnapshots(ObjectStore(URL, 1.0), store, Retention(3), allowed=allowed)
    store.write(5, arrays(5), {})
    with pytest.raises(StoreError, match="another job"):
        snapshots._send_newest()
    assert len(asked) == 2 and snapshots.steps() == []


def test_a_disk_without_room_for_what_is_sent_is_told(s3, tmp_path, monkeypatch):
    def full(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)

    store = local(tmp_path, "here")
    snapshots = sender(store)
    store.write(10, arrays(10), {})
    with monkeypatch.context() as changed:
        changed.setattr(remote_snapshots, "_linked", full)
        with pytest.raises(StoreError, match="snapshot of step 10 .*No space left"):
            snapshots._send(10)
    snapshots._send(10)
    store.delete(10)
    snapshots._send(10)  # does nothing
    assert sender(local(tmp_path, "there")).steps() == [10]


def test_a_damaged_manifest_here_is_told_and_holds_nothing_up(s3, tmp_path):
    """Nothing else was sent from then on, without a word."""
    store = local(tmp_path, "here")
    send(store, 10, 20)
    file = Path(store.path(10), "manifest.json")
    content = bytearray(file.read_bytes())
    content[40] ^= 0x80  # which is no text any more
    file.write_bytes(content)
    store.write(30, arrays(30), {})
    snapshots = sender(store)
    snapshots.start()
    assert snapshots.sender.finish_soon(30.0) == []
    snapshots.sender.end(30.0)
    assert snapshots.steps() == [10, 20, 30]
    assert "manifest.json is damaged" in str(snapshots.sender.trouble())
    store.write(10, arrays(11), {})
    assert snapshots.unsent() == [10], "it is written again, as after a rollback"


def test_whatever_fails_is_told_and_tried_again():
    errors: list[Exception] = [KeyError("manifest"), OSError(errno.EIO, "Input/output error", "file")]
    told = []

    def send() -> None:
        told.append(str(sending.trouble()))
        if errors:
            raise errors.pop()

    sending = upload_thread.UploadThread(lambda: [10] if len(told) < 3 else [], send)
    sending.start()
    assert sending.finish_soon(30.0) == []
    sending.end(30.0)
    assert "OSError: [Errno 5] Input/output error" in told[1] and "KeyError: 'manifest'" in told[2]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_of_many_faults_none_makes_a_half_snapshot_believed(through_proxy, tmp_path, seed):
    """Each round writes a snapshot, sends it through faults, and reads on an empty machine through faults."""
    chance = random.Random(seed)

    def draw(method: str, path: str) -> str:
        return chance.choice(FAULTS) if chance.random() < 0.35 else ""

    store, newest = local(tmp_path, "here"), 0
    with through_proxy(draw) as proxy:
        snapshots, reader = sender(store, patience=60.0), ObjectStore(URL, patience=60.0)
        snapshots.start()
        while sum(proxy.done.values()) < 105:
            newest += 10
            store.write(newest, arrays(newest), {})
            if chance.random() < 0.5:
                snapshots.sender.finish_soon(30.0)
            there = local(tmp_path, f"there-{newest}")
            sender(there, objects=reader).bring_newest()
            for step in there.steps():
                assert is_right(there, step)
            for old in store.steps()[:-3]:
                store.delete(old)
        assert snapshots.sender.finish_soon(60.0) == []
        snapshots.sender.end()
    last = local(tmp_path, "last")
    sender(last).bring_newest()
    assert last.steps() == [newest] and is_right(last, newest)


def test_an_evaluator_forgets_what_the_store_has_in_another_form_or_no_more(s3, tmp_path):
    """The run that it has read was removed, and another one is at its place."""
    there = local(tmp_path, "there")
    for steps in ((10, 20, 40), (20, 30)):
        s3.empty()
        send(local(tmp_path, f"run of {steps[-1]}"), *steps)
        for step in (20, -1):
            bring_for_reading(ObjectStore(URL), there, step)
        assert there.steps() == sorted({20, steps[-1]}) and is_right(there, steps[-1])
        text = s3.content(f"{FOLDER}/step-00000020/manifest.json")
        assert text == (Path(there.path(20)) / "manifest.json").read_bytes()


def test_a_reader_keeps_no_copy_of_what_the_store_has_no_more(s3, tmp_path):
    """One that followed a run kept each snapshot that it had brought, until the disk was full."""
    here, there = local(tmp_path, "here"), local(tmp_path, "there")
    snapshots, objects = sender(here), ObjectStore(URL)
    for step in (10, 20, 30):
        here.write(step, arrays(step), {})
        snapshots._send(step)
        bring_for_reading(objects, there)
    assert there.steps() == [10, 20, 30]
    left = Path(there.directory) / ".writing-step-00000030-of-a-killed-reader"
    left.mkdir()
    snapshots.remove(10)
    bring_for_reading(objects, there, 20)
    assert there.steps() == [10, 20, 30], "one that asks for a step leaves the others theirs"
    bring_for_reading(objects, there)
    assert there.steps() == [20, 30] and not left.exists()
    for step in (20, 30):
        snapshots.remove(step)
    here.write(40, arrays(40), {})
    snapshots._send(40)
    name = next(name for name in s3.names(f"{FOLDER}/step-00000040") if "data-00000" in name)
    s3.change(name, bytes(len(s3.content(name))))
    bring_for_reading(objects, there)
    assert there.steps() == [20, 30], "no newer one is valid"


def test_readers_on_one_machine_bring_a_snapshot_once(s3, tmp_path, monkeypatch):
    """Two at once removed each what the other had brought and was reading."""
    send(local(tmp_path, "here"), 10)
    there, brought, bring = local(tmp_path, "there"), [], RemoteSnapshots.bring
    monkeypatch.setattr(RemoteSnapshots, "bring", lambda self, step: (brought.append(step), bring(self, step)))
    with ThreadPoolExecutor(4) as readers:
        list(readers.map(lambda step: bring_for_reading(ObjectStore(URL), there, step), (-1, 10, -1, 10)))
    assert brought == [10] and is_right(there, 10)


def test_an_evaluator_is_told_of_damaged_snapshots(s3, tmp_path, capfd):
    send(local(tmp_path, "here"), 10, 20)
    name = next(name for name in s3.names(f"{FOLDER}/step-00000020") if "data-00000" in name)
    s3.change(name, bytes(len(s3.content(name))))
    bring_for_reading(ObjectStore(URL), local(tmp_path, "there"))
    assert "skipped a snapshot of s3://" in capfd.readouterr().err


def test_a_reader_that_is_done_with_the_newest_reads_nothing(s3, tmp_path, monkeypatch):
    """One that follows a run asks each second; all of its copy was verified each time."""
    send(local(tmp_path, "here"), 10)
    there = local(tmp_path, "there")
    bring_for_reading(ObjectStore(URL), there)
    monkeypatch.setattr(SnapshotFolder, "verify", lambda self, step: pytest.fail("is read again"))
    bring_for_reading(ObjectStore(URL), there, after=10)


def test_an_evaluator_brings_the_step_that_it_is_asked_for(s3, tmp_path):
    send(local(tmp_path, "here"), 10, 20)
    there = local(tmp_path, "there")
    bring_for_reading(ObjectStore(URL), there, 10)
    assert there.steps() == [10]
    with pytest.raises(CheckpointError, match="--at_step=15: s3://.* has no snapshot of that step; it has 10, 20"):
        bring_for_reading(ObjectStore(URL), there, 15)
